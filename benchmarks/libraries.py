"""The same model in several libraries, in training mode, each with the losses that it may be trained with.

nanoGPT (github.com/karpathy/nanoGPT) is no package. ``nano-gpt`` is one after it, by another author: the same model,
with the fused attention of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: (model, token ids ``[B, T+1]``) → mean loss.
Loss = Callable[[Any, Tensor], Tensor]


class CannotBuildError(Exception):
    """The library has no model of this shape; the message says why, in a few words."""


@dataclass(frozen=True)
class Shape:
    """A decoder, by default ``configs/models/llama-152m.yaml``, with the batch that it is trained on."""

    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int = 0
    """0: as many as heads."""
    d_ff: int = 3072
    vocab_size: int = 50304
    seq_len: int = 1024
    micro_batch: int = 1
    tie_embeddings: bool = True
    gpt2: bool = False
    """The architecture of GPT-2 (learned positions, layer norms, biases, GELU) in place of LLaMA's."""

    def batch(self, device: torch.device | str = "cpu") -> Tensor:
        """Draw token ids ``[B, T+1]``."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocab_size, (self.micro_batch, self.seq_len + 1), generator=generator).to(device)


def model_fields(shape: Shape) -> dict[str, Any]:
    """Return the shape as fields of our ModelConfig."""
    fields = asdict(shape)
    fields["max_seq_len"] = fields.pop("seq_len")
    fields["n_kv_heads"] = fields["n_kv_heads"] or None
    del fields["micro_batch"]
    if fields.pop("gpt2"):
        return {**fields, "norm": "layernorm", "mlp": "gelu_tanh", "positions": "learned", "bias": True}
    return {**fields, "mlp": "swiglu", "norm_eps": 1e-6}


def cross_entropy(logits_BTV: Tensor, batch: Tensor) -> Tensor:
    """Compute the plain loss from whole logits."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())


def drawn(config: Any, device: torch.device | str = "cpu") -> Any:
    """Build a decoder of ours with weights drawn on the device. Times do not depend on them, and a birth, which is bit
    for bit that of a CPU, takes 20 s of a GPU's time at 1.1B.
    """
    from birthmark.models.decoder import Decoder

    with torch.device(device):
        model = Decoder(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    return model


def birthmark(shape: Shape, device: torch.device | str = "cpu") -> tuple[nn.Module, dict[str, Loss]]:
    from birthmark.models.config import ModelConfig
    from birthmark.trainer.module import next_token_loss

    model = drawn(ModelConfig(**model_fields(shape)), device).train()
    return model, {"the trainer's": lambda model, batch: next_token_loss(model, batch).objective}


def transformers(shape: Shape, device: torch.device | str = "cpu") -> tuple[nn.Module, dict[str, Loss]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from birthmark.models.config import ModelConfig
    from birthmark.models.exchange.conversion import config_to_json, family_of

    ours = ModelConfig(**model_fields(shape))
    content = config_to_json(ours, family_of(ours)) | {"use_cache": False}
    content |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    # GPT-2 has dropout by default, which its fused attention pays for.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attn_dropout") and isinstance(module.attn_dropout, float):
            module.attn_dropout = 0.0

    def own(model: Any, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:].contiguous()
        return model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    def plain(model: Any, batch: Tensor) -> Tensor:
        return cross_entropy(model(input_ids=batch[:, :-1], use_cache=False).logits, batch)

    return model, {"its own": own, "F.cross_entropy": plain}


def litgpt(shape: Shape, device: torch.device | str = "cpu") -> tuple[nn.Module, dict[str, Loss]]:
    if shape.gpt2:
        raise CannotBuildError("litgpt has no learned positions")
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_query_groups=shape.n_kv_heads or shape.n_heads,
        intermediate_size=shape.d_ff,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        block_size=shape.seq_len,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
    )

    def own(model: Any, batch: Tensor) -> Tensor:
        return chunked_cross_entropy(model(batch[:, :-1]), batch[:, 1:])

    def plain(model: Any, batch: Tensor) -> Tensor:
        return cross_entropy(model(batch[:, :-1]), batch)

    with torch.device(device):
        model = GPT(config).train()
    if shape.tie_embeddings:
        model.transformer.wte.weight = model.lm_head.weight  # as its pretraining does it
    return model, {"its own, chunked": own, "F.cross_entropy": plain}


def nano_gpt(shape: Shape, device: torch.device | str = "cpu") -> tuple[nn.Module, dict[str, Loss]]:
    if not shape.gpt2:
        raise CannotBuildError("nanoGPT has no LLaMA-like model")
    from nano_gpt.model import GPT

    # The fields that its model reads; the config's own class allows only its published sizes.
    config = SimpleNamespace(
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        vocab_size=shape.vocab_size,
        block_size=shape.seq_len,
    )
    with torch.device(device):
        model = GPT(config, None).train()
    return model, {"its own": lambda model, batch: model(batch[:, :-1], batch[:, 1:].contiguous())[1]}


Build = Callable[..., tuple[nn.Module, dict[str, Loss]]]

#: Libraries by the names that pip knows them by. Each builds (shape, device).
LIBRARIES: dict[str, Build] = {
    "birthmark": birthmark,
    "transformers": transformers,
    "litgpt": litgpt,
    "nano-gpt": nano_gpt,
}
