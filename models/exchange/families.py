"""Model families of ``transformers`` that this decoder can express: their configs and tensors, name by name, in one
table.

A family is data: what reads and writes with it (``conversion.py``) never compares a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A ``model_type``: contents of its ``config.json``, their limits, and the places of its tensors."""

    model_type: str
    """Name of the family in ``config.json``."""

    architecture: str
    """Class with the language-model head."""

    keys: dict[str, str]
    """Key of ``config.json`` → field of ModelConfig; two keys of one field must agree."""

    fixed: dict[str, Any]
    """Fields of ModelConfig, dotted, that every model of the family has; all others have their defaults."""

    silent: dict[str, Any]
    """Values that ``transformers`` assumes for keys missing from ``config.json``; None: the value that ModelConfig
    derives.
    """

    modules: dict[str, str]
    """Module of this decoder → module of the family, the first ``*`` the block, a second the expert; several modules in
    one of the family lie side by side, in this order.
    """

    base: str
    """Prefix that checkpoints of the family without a language-model head leave out."""

    activation: str = "hidden_act"
    """Key of the activation."""

    gated: bool = True
    """True if the MLP is gated."""

    required: dict[str, Any] = field(default_factory=dict)
    """Keys that change the function in a way that ModelConfig cannot express, with their neutral value; every entry of
    a list must have it.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    """Another name of a key → its name here; both are written."""

    any_head_dim: bool = False
    """True if d_model need not be a multiple of n_heads."""

    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of a tensor → its name here."""

    not_parameters: tuple[str, ...] = ()
    """Ends of the names of tensors that old checkpoints hold and that follow from the config."""

    transposed: frozenset[str] = frozenset()
    """Modules of the family, by last name, whose weights are ``[in, out]``."""

    by_head: bool = False
    """True if tensors are joined within each head."""

    dropout: dict[str, str] = field(default_factory=lambda: {"attention_dropout": "attention"})
    """Key of ``config.json`` → field of DropoutConfig: written, since ``transformers`` has rates for missing keys; a
    rate without a key here is lost.
    """

    own_tokenizer: bool = False
    """True if ``AutoTokenizer`` (5.x) splits text by the family's own rules, regardless of ``tokenizer.json``."""


#: Activations of ``transformers`` → activations of this decoder; if several names mean the same, the first is written.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "linear": "identity",
    "relu2": "relu2",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}

_SHAPE = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
    "rope_theta": "rope_base",
}
_GROUPED = _SHAPE | {"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim", "rms_norm_eps": "norm_eps"}
_SILENT = {
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_QWEN = _SILENT | {"num_key_value_heads": 32}
_ROTARY = {"rope_type": "default", "partial_rotary_factor": 1.0}
_FULL = _ROTARY | {"use_sliding_window": False, "layer_types": "full_attention"}
_QK_NORM = {f"blocks.*.attn.{x}.norm": f"model.layers.*.self_attn.{x}_norm" for x in "qk"}
_BLOCKS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    **{f"blocks.*.attn.{x}": f"model.layers.*.self_attn.{x}_proj" for x in "qkvo"},
    **{f"blocks.*.mlp.{x}": f"model.layers.*.mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_PRE_NORM = _BLOCKS | {
    "blocks.*.norm_attn": "model.layers.*.input_layernorm",
    "blocks.*.norm_mlp": "model.layers.*.post_attention_layernorm",
}
_INV_FREQ = ("rotary_emb.inv_freq",)
_CHOICE = {"num_experts_per_tok": "experts.top_k"}
_EXPERTS = {"num_experts": "experts.n_experts", "norm_topk_prob": "experts.renormalise", **_CHOICE}


def _with_experts(modules: dict[str, str], mlp: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return ``modules`` with experts in place of the dense MLP, by their names in the family's ``mlp``."""
    maps = {"gate": gate, "up": up, "down": down}
    return {
        **{part: name for part, name in modules.items() if not part.startswith("blocks.*.mlp.")},
        "blocks.*.mlp.router": f"model.layers.*.{mlp}.{router}",
        **{f"blocks.*.mlp.experts.*.{part}": f"model.layers.*.{mlp}.experts.*.{name}" for part, name in maps.items()},
    }


_PROJECTIONS = ("mlp", "gate", "gate_proj", "up_proj", "down_proj")

#: In the order in which a family is looked for.
FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        keys={
            "vocab_size": "vocab_size",
            "n_embd": "d_model",
            "n_layer": "n_layers",
            "n_head": "n_heads",
            "n_inner": "d_ff",
            "n_positions": "max_seq_len",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
        },
        fixed={"norm": "layernorm", "positions": "learned", "bias": True},
        silent={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
        },
        modules={
            "embed": "transformer.wte",
            "positions.table": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            "blocks.*.norm_attn": "transformer.h.*.ln_1",
            "blocks.*.norm_mlp": "transformer.h.*.ln_2",
            **{f"blocks.*.attn.{x}": "transformer.h.*.attn.c_attn" for x in "qkv"},
            "blocks.*.attn.o": "transformer.h.*.attn.c_proj",
            "blocks.*.mlp.up": "transformer.h.*.mlp.c_fc",
            "blocks.*.mlp.down": "transformer.h.*.mlp.c_proj",
        },
        dropout={"embd_pdrop": "embedding", "resid_pdrop": "residual", "attn_pdrop": "attention"},
        base="transformer.",
        activation="activation_function",
        gated=False,
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        not_parameters=("attn.bias", "attn.masked_bias"),
        transposed=frozenset({"c_attn", "c_proj", "c_fc"}),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        keys=_GROUPED | {"attention_bias": "bias", "mlp_bias": "bias"},
        fixed={},
        silent=_SILENT | {"attention_bias": False, "mlp_bias": False},
        modules=_PRE_NORM,
        base="model.",
        required=_ROTARY,
        not_parameters=_INV_FREQ,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        keys=_GROUPED | {"sliding_window": "attention.window"},
        fixed={},
        silent=_SILENT | {"num_key_value_heads": 8, "sliding_window": 4096},
        modules=_PRE_NORM,
        base="model.",
        required=_ROTARY,
        not_parameters=_INV_FREQ,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        keys=_GROUPED,
        fixed={"attention.qkv_bias": True},
        silent=_QWEN,
        modules=_PRE_NORM,
        base="model.",
        required=_FULL,
        any_head_dim=True,
        not_parameters=_INV_FREQ,
        own_tokenizer=True,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        keys=_GROUPED,
        fixed={"attention.qk_norm": "head"},
        silent=_QWEN | {"head_dim": 128},
        modules=_PRE_NORM | _QK_NORM,
        base="model.",
        required=_FULL | {"attention_bias": False},
        any_head_dim=True,
        not_parameters=_INV_FREQ,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        keys=_GROUPED,
        fixed={"attention.qk_norm": "width", "norm_placement": "post"},
        silent=_SILENT | {"rms_norm_eps": 1e-5},
        modules={
            **_BLOCKS,
            **_QK_NORM,
            "blocks.*.norm_attn_out": "model.layers.*.post_attention_layernorm",
            "blocks.*.norm_mlp_out": "model.layers.*.post_feedforward_layernorm",
        },
        base="model.",
        required=_ROTARY | {"attention_bias": False},
        any_head_dim=True,
        not_parameters=_INV_FREQ,
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        keys=_SHAPE
        | {
            "partial_rotary_factor": "rope_fraction",
            "layer_norm_eps": "norm_eps",
            "use_parallel_residual": "parallel_residual",
        },
        fixed={"norm": "layernorm", "bias": True},
        silent={
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
        },
        modules={
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
            "blocks.*.norm_attn": "gpt_neox.layers.*.input_layernorm",
            "blocks.*.norm_mlp": "gpt_neox.layers.*.post_attention_layernorm",
            **{f"blocks.*.attn.{x}": "gpt_neox.layers.*.attention.query_key_value" for x in "qkv"},
            "blocks.*.attn.o": "gpt_neox.layers.*.attention.dense",
            "blocks.*.mlp.up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
            "blocks.*.mlp.down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
        },
        dropout={"hidden_dropout": "residual", "attention_dropout": "attention"},
        base="gpt_neox.",
        gated=False,
        required={"rope_type": "default", "attention_bias": True},
        renamed={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        aliases={"lm_head.weight": "embed_out.weight"},
        not_parameters=("attention.bias", "attention.masked_bias", *_INV_FREQ),
        by_head=True,
    ),
    Family(
        "arcee",
        "ArceeForCausalLM",
        keys=_GROUPED | {"attention_bias": "bias", "mlp_bias": "bias"},
        fixed={},
        silent=_SILENT | {"attention_bias": False, "mlp_bias": False, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        modules={part: name for part, name in _PRE_NORM.items() if part != "blocks.*.mlp.gate"},
        base="model.",
        gated=False,
        required=_ROTARY,
        not_parameters=_INV_FREQ,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        keys=_GROUPED | _CHOICE | {"num_local_experts": "experts.n_experts", "sliding_window": "attention.window"},
        fixed={},
        silent=_SILENT
        | {"rope_theta": 1e6, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        modules=_with_experts(_PRE_NORM, "block_sparse_moe", "gate", "w1", "w3", "w2"),
        base="model.",
        required=_ROTARY,
        not_parameters=_INV_FREQ,
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        keys={key: name for key, name in _GROUPED.items() if key != "head_dim"} | _EXPERTS,
        fixed={"attention.qk_norm": "width"},
        silent=_SILENT | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        modules=_with_experts(_PRE_NORM | _QK_NORM, *_PROJECTIONS),
        base="model.",
        required=_ROTARY | {"attention_bias": False, "clip_qkv": None},
        not_parameters=_INV_FREQ,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys={key: name for key, name in _GROUPED.items() if key != "intermediate_size"}
        | _EXPERTS
        | {"moe_intermediate_size": "d_ff"},
        fixed={"attention.qk_norm": "head"},
        silent=_SILENT
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | {"moe_intermediate_size": 768},
        modules=_with_experts(_PRE_NORM | _QK_NORM, *_PROJECTIONS),
        base="model.",
        required=_FULL | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        renamed={"num_local_experts": "num_experts"},
        any_head_dim=True,
        not_parameters=_INV_FREQ,
    ),
)
