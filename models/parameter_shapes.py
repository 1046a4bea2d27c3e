"""Names and shapes of a decoder's parameters, from the config alone. No model is built and no torch loaded, unless
parts of attention are a user's class.

A test compares them with the models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from .config import ModelConfig

NamedShape: TypeAlias = tuple[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Iterator[NamedShape]:
    """Yield names and shapes of all parameters, in the model's order."""
    d = config.d_model
    yield "embed.weight", (config.vocab_size, d)
    if config.positions == "learned":
        yield "positions.table.weight", (config.max_seq_len, d)
    if config.positions == "t5":
        yield "positions.table.weight", (config.t5_buckets, config.n_heads)
    for i in range(config.n_layers):
        for name, shape in _block(config, i):
            yield f"blocks.{i}.{name}", shape
    yield from _norm(config, "norm")
    if not config.tie_embeddings:
        yield "head.weight", (config.vocab_size, d)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all parameters and buffers, tied ones once, in name order. This loads torch."""
    import torch

    from .decoder import Decoder

    with torch.device("meta"):
        model = Decoder(config)
    return {name: tuple(tensor.shape) for name, tensor in sorted(model.state_dict().items())}


def _norm(config: ModelConfig, name: str) -> Iterator[NamedShape]:
    if config.norm == "dyt":
        yield f"{name}.alpha", (1,)
    if config.norm != "none":
        yield f"{name}.gain", (config.d_model,)
    if config.norm_scale:
        yield f"{name}.scale", (config.d_model,)
    if config.norm in ("layernorm", "dyt") and config.bias:
        yield f"{name}.bias", (config.d_model,)
    if config.norm != "none" and config.norm_gate is not None:
        yield f"{name}.gate.down.weight", (config.norm_gate, config.d_model)
        yield f"{name}.gate.up.weight", (config.d_model, config.norm_gate)


def _linear(name: str, n_in: int, n_out: int, bias: bool) -> Iterator[NamedShape]:
    yield f"{name}.weight", (n_out, n_in)
    if bias:
        yield f"{name}.bias", (n_out,)


def _sublayer_norms(config: ModelConfig, name: str) -> Iterator[NamedShape]:
    if config.norm_placement != "post":
        yield from _norm(config, name)
    if config.norm_placement != "pre":
        yield from _norm(config, f"{name}_out")


def _block(config: ModelConfig, block: int) -> Iterator[NamedShape]:
    yield from _sublayer_norms(config, "norm_attn")
    for name, shape in _attention(config, block):
        yield f"attn.{name}", shape
    yield from _sublayer_norms(config, "norm_mlp")
    if config.experts.in_block(block):
        yield from _mixture(config)
    else:
        yield from _mlp(config, "mlp", config.ff)


def _mlp(config: ModelConfig, name: str, ff: int) -> Iterator[NamedShape]:
    for part in ("gate", "up") if config.gated else ("up",):
        yield from _linear(f"{name}.{part}", config.d_model, ff, config.bias)
    yield from _linear(f"{name}.down", ff, config.d_model, config.bias)


def _mixture(config: ModelConfig) -> Iterator[NamedShape]:
    experts = config.experts
    yield from _linear("mlp.router", config.d_model, experts.n_experts or 0, bias=False)
    for expert in range(experts.n_experts or 0):
        yield from _mlp(config, f"mlp.experts.{expert}", experts.d_ff or config.ff)
    if experts.d_shared is not None:
        yield from _mlp(config, "mlp.shared", experts.d_shared)


def n_idle(config: ModelConfig) -> int:
    """Count the parameters that one token does not pass: those of experts that its routers do not choose."""
    experts = config.experts
    if experts.n_experts is None:
        return 0
    n_blocks = config.n_layers - (experts.n_dense or 0)
    one = sum(math.prod(shape) for _, shape in _mlp(config, "", experts.d_ff or config.ff))
    return n_blocks * (experts.n_experts - experts.top_k) * one


def _built_attention(config: ModelConfig, block: int) -> Iterator[NamedShape]:
    """Yield the attention's names and shapes if a part is a user's class, which alone knows its parameters: this loads
    torch.
    """
    import torch

    from .attention.attention import attention_of

    with torch.device("meta"):
        for name, parameter in attention_of(config)(config, block).named_parameters():
            yield name, tuple(parameter.shape)


def _maps(config: ModelConfig) -> Iterator[NamedShape]:
    attention, d_head = config.attention, config.d_head
    for name, n_heads in (("q", config.n_heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        yield from _linear(name, config.d_model, n_heads * d_head, config.qkv_bias)
        norm = attention.v_norm if name == "v" else attention.qk_norm
        if norm != "none":
            yield f"{name}.norm.gain", (n_heads * d_head if norm == "width" else d_head,)


def _latent_maps(config: ModelConfig) -> Iterator[NamedShape]:
    latent, d, n_heads, bias = config.attention.latent, config.d_model, config.n_heads, config.qkv_bias
    assert latent.kv_rank is not None
    if latent.q_rank is None:
        yield from _linear("q", d, n_heads * config.d_key, bias)
    else:
        yield from _linear("q_down", d, latent.q_rank, bias)
        yield "q_norm.gain", (latent.q_rank,)
        yield from _linear("q_up", latent.q_rank, n_heads * config.d_key, bias)
    yield from _linear("kv_down", d, latent.kv_rank + config.d_rope, bias)
    yield "kv_norm.gain", (latent.kv_rank,)
    yield from _linear("kv_up", latent.kv_rank, n_heads * (config.d_key - config.d_rope + config.d_value), bias)


def _attention(config: ModelConfig, block: int) -> Iterator[NamedShape]:
    if config.attention.own_parts:
        yield from _built_attention(config, block)
        return
    attention, d_key, d_value = config.attention, config.d_key, config.d_value
    yield from _latent_maps(config) if attention.latent.is_on else _maps(config)
    yield from _linear("o", config.n_heads * d_value, config.d_model, config.bias)
    if attention.normaliser == "softmax_sink":
        yield "normaliser.logit", (config.n_heads,)
    if attention.normaliser == "differential":
        yield from ((f"normaliser.{name}", (d_key,)) for name in ("q1", "k1", "q2", "k2"))
    rows = 1 if attention.kv_bias_shared else config.kv_heads
    for name in ("key", "value"):
        if name in attention.kv_bias:
            yield f"bias.{name}", ((attention.kv_bias_tokens or 1) * rows, d_key if name == "key" else d_value)
    if attention.aggregation_blocks is None or block in attention.aggregation_blocks:
        if attention.aggregation == "headnorm":
            yield "aggregate.gain", (d_value,)
        if attention.aggregation == "headnorm_released":
            yield "aggregate.gain", (config.n_heads, d_value)
        if attention.aggregation == "differential_norm":
            yield "aggregate.gain", (2 * d_value,)
        if attention.aggregation == "calibrated" and attention.calibration.correlation == "learned":
            yield "aggregate.rho.logit", (config.n_heads,)
    if attention.gate != "none":
        n_in = config.kv_heads * d_value if attention.gate_input == "value" else config.d_model
        yield from _linear("gate.map", n_in, math.prod(config.gate_sizes), config.bias)
