"""Names of the modules at the named places, inside the blocks of each family of ``transformers``: one row per model
type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class AfterAttention:
    """Module of the block at which the residual stream after the attention is seen."""

    module: str
    how: Literal["input", "output", "added"] = "input"
    """Source of the stream: the module's input or its output; or the block's input plus the module's output."""


@dataclass(frozen=True)
class MlpModules:
    """Names of the linear maps of a dense MLP, inside a block."""

    up: str
    down: str
    gate: str | None = None
    transposed: bool = False
    """True if weights are ``[in, out]``."""
    both: bool = False
    """True if ``up`` holds the gate's rows before its own."""


@dataclass(frozen=True)
class FamilyPlaces:
    """Names of the observed modules inside a block."""

    attn: str
    """The attention, where a block has one: some families have blocks without."""
    o: str
    """Name of the output projection."""
    after_attention: AfterAttention
    mlp: MlpModules
    """The MLP, where it is dense; blocks with experts have no such modules."""
    gated: bool = False
    """True if a gate acts on head outputs before the output projection."""
    limited: bool = False
    """True if the model reads no more positions than its table holds."""


_SWIGLU = MlpModules("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")
_LLAMA = FamilyPlaces("self_attn", "self_attn.o_proj", AfterAttention("post_attention_layernorm"), _SWIGLU)
#: Attention and MLP side by side. That each is added alone makes the sum right for blocks in series too.
_PARALLEL = replace(_LLAMA, after_attention=AfterAttention("self_attn", "added"))
_POST_NORM = replace(_LLAMA, after_attention=AfterAttention("mlp"))
_SANDWICH = replace(_LLAMA, after_attention=AfterAttention("pre_feedforward_layernorm"))
_GPT2 = FamilyPlaces(
    "attn",
    "attn.c_proj",
    AfterAttention("ln_2"),
    MlpModules("mlp.c_fc", "mlp.c_proj", transposed=True),
    limited=True,
)
_BLOOM = FamilyPlaces(
    "self_attention",
    "self_attention.dense",
    AfterAttention("post_attention_layernorm"),
    MlpModules("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)


def _opt(config: Any) -> FamilyPlaces:
    """Return the places of OPT; only the 350m model normalises after each sum."""
    after = AfterAttention("final_layer_norm") if config.do_layer_norm_before else _OPT_POST
    return FamilyPlaces("self_attn", "self_attn.out_proj", after, MlpModules("fc1", "fc2"), limited=True)


_OPT_POST = AfterAttention("self_attn_layer_norm", "output")

#: The experts of a block that has any, in all families of the table: they are called with states and chosen experts.
EXPERTS = "mlp.experts"

#: Model type → places, or a function that makes them from a config.
_FAMILIES: Mapping[str, FamilyPlaces | Callable[[Any], FamilyPlaces]] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "olmo",
            "smollm3",
            "granite",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "olmoe",
            "gpt_oss",
            "deepseek_v2",
            "deepseek_v3",
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("cohere", "cohere2", "stablelm"), _PARALLEL),
    **dict.fromkeys(("olmo2", "olmo3"), _POST_NORM),
    **dict.fromkeys(("gemma2", "gemma3_text"), _SANDWICH),
    "qwen3_next": replace(_LLAMA, gated=True),
    "arcee": replace(_LLAMA, mlp=MlpModules("mlp.up_proj", "mlp.down_proj")),
    "phi3": replace(_LLAMA, mlp=MlpModules("mlp.gate_up_proj", "mlp.down_proj", both=True)),
    "starcoder2": replace(_LLAMA, mlp=MlpModules("mlp.c_fc", "mlp.c_proj")),
    "phi": replace(_PARALLEL, o="self_attn.dense", mlp=MlpModules("mlp.fc1", "mlp.fc2")),
    "gpt2": _GPT2,
    "gpt_neo": replace(
        _GPT2, attn="attn.attention", o="attn.attention.out_proj", mlp=MlpModules("mlp.c_fc", "mlp.c_proj")
    ),
    "gptj": replace(
        _GPT2,
        o="attn.out_proj",
        after_attention=AfterAttention("attn", "added"),
        mlp=MlpModules("mlp.fc_in", "mlp.fc_out"),
    ),
    "gpt_neox": replace(
        _BLOOM, attn="attention", o="attention.dense", after_attention=AfterAttention("attention", "added")
    ),
    "opt": _opt,
    "bloom": _BLOOM,
    "falcon": replace(_BLOOM, after_attention=AfterAttention("self_attention", "added")),
    "mpt": FamilyPlaces(
        "attn", "attn.out_proj", AfterAttention("norm_2"), MlpModules("ffn.up_proj", "ffn.down_proj"), limited=True
    ),
}

#: Model types whose places are all known.
MODEL_TYPES = tuple(_FAMILIES)


def places_of(model_type: str, config: Any) -> FamilyPlaces | None:
    """Return the row of a model type; None without one.

    Args:
        model_type: name in ``config.json``.
        config: the config of its text model.
    """
    found = _FAMILIES.get(model_type)
    return found(config) if callable(found) else found
