"""Models that are worth comparing, and something to feed them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from birthmark.models.config import AttentionConfig, ExpertsConfig, ModelConfig


def _random_tokens(config: ModelConfig, n: int = 3, length: int | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (n, length or config.max_seq_len), generator=generator)


@pytest.fixture
def random_tokens():
    """``random_tokens(config, n=3, length=None, seed=0)``: int64 ``[n, length or max_seq_len]``."""
    return _random_tokens


_SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}
#: By the family of transformers that has the architecture too.
_OURS = {
    "gpt2": ModelConfig(
        **_SMALL, norm="layernorm", positions="learned", mlp="gelu_tanh", bias=True, tie_embeddings=True, norm_eps=1e-4
    ),
    "llama": ModelConfig(**_SMALL, n_kv_heads=2, mlp="swiglu", rope_base=500.0),
    "mistral": ModelConfig(**_SMALL, n_kv_heads=2, mlp="swiglu", attention=AttentionConfig(window=5)),
    "qwen2": ModelConfig(**_SMALL, n_kv_heads=1, mlp="swiglu", attention=AttentionConfig(qkv_bias=True)),
    "qwen3": ModelConfig(
        **_SMALL, n_kv_heads=2, mlp="swiglu", head_dim=12, tie_embeddings=True,
        attention=AttentionConfig(qk_norm="head"),
    ),
    "olmo2": ModelConfig(**_SMALL, mlp="swiglu", norm_placement="post", attention=AttentionConfig(qk_norm="width")),
    "mixtral": ModelConfig(
        **_SMALL, n_kv_heads=2, mlp="swiglu", rope_base=500.0, attention=AttentionConfig(window=5),
        experts=ExpertsConfig(n_experts=5, d_ff=20, load_balance=0.5),
    ),
    "olmoe": ModelConfig(
        **_SMALL, mlp="swiglu", attention=AttentionConfig(qk_norm="width"),
        experts=ExpertsConfig(n_experts=5, top_k=3, renormalise=False),
    ),
    "qwen3_moe": ModelConfig(
        **_SMALL, n_kv_heads=2, mlp="swiglu", head_dim=12, attention=AttentionConfig(qk_norm="head"),
        experts=ExpertsConfig(n_experts=5, d_ff=20),
    ),
    "gpt_neox": ModelConfig(**_SMALL, norm="layernorm", bias=True, parallel_residual=True, rope_fraction=0.25),
    "arcee": ModelConfig(**_SMALL, n_kv_heads=2, mlp="gelu", rope_base=500.0),
}  # fmt: skip


@pytest.fixture(params=_OURS)
def our_name(request):
    """Families of transformers in turn."""
    return request.param


@pytest.fixture
def our_config():
    """``our_config(name, **changes)``: a small model of ours that the family of this name has too."""
    return lambda name, **changes: replace(_OURS[name], **changes)


@pytest.fixture
def their_folder(their_model):
    """``their_folder(name, path, **more)``: where save_pretrained wrote a model of transformers; the path."""

    def write(name, path, **more):
        their_model(name).save_pretrained(path, **more)
        return path

    return write
