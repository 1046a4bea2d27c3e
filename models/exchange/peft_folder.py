"""Adapters as ``peft`` reads them: a folder with ``adapter_config.json`` and safetensors, beside an exported model.

Supported: LoRA of maps that a family of ``transformers`` keeps separate, and prefixes for families whose caches hold
keys as they enter the scores. ``peft`` has no kind for the matrices of Prefix-Tuning+.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import UsageError
from ...files import save_tensors
from ..adapters import Lora, PrefixKeys, adapter_of
from ..attention.attention import Attention
from ..attention.positions import Placement
from ..attention.rotation import rotate
from ..decoder import Decoder
from ..init import Linear
from .conversion import family_of
from .families import Family

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"


def write_peft(model: Decoder, folder: Path, base: str) -> None:
    """Write the adapter of a model, for ``PeftModel.from_pretrained`` on the exported base. The caller makes the folder
    atomic.

    Args:
        model: whole, with its adapter.
        folder: new.
        base: folder or hub id that peft loads if no model is given.

    Raises:
        UsageError: a kind that peft does not have, or an architecture in which it cannot be.
    """
    kind = adapter_of(model).kind
    if kind not in _KINDS:
        raise UsageError(
            f"adapter.kind {kind}: peft has no such kind; load it with birthmark, or train lora or prefix to export it"
        )
    # An adapter writes no base: a model that transformers has is its base, whatever the cache there does.
    settings, tensors = _KINDS[kind](model, family_of(model.config, cached=False))
    folder.mkdir(parents=True)
    contiguous = {name: x.detach().float().contiguous() for name, x in tensors.items()}
    save_tensors(save_file, contiguous, folder / _TENSORS)
    common = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    (folder / _CONFIG).write_text(json.dumps(common | settings, indent=2) + "\n", encoding="utf-8")


def _lora(model: Decoder, family: Family) -> tuple[dict[str, Any], dict[str, Tensor]]:
    adapter, targets, tensors = adapter_of(model), [], {}
    transposed: set[bool] = set()
    for name in adapter.lora_maps:
        module = family.modules[f"blocks.*.{name}"]
        if list(family.modules.values()).count(module) > 1:
            raise UsageError(
                f"adapter.maps names {name}, which {family.model_type} keeps in one tensor with others: no LoRA of "
                "peft is of a part of it; export with --merge"
            )
        targets.append(module.rpartition("*.")[2])
        transposed.add(module.rpartition(".")[2] in family.transposed)
        for i, block in enumerate(model.blocks):
            lora = cast(Lora, cast(Linear, block.get_submodule(name)).adapter)
            full = f"base_model.model.{module.replace('*', str(i))}"
            tensors[f"{full}.lora_A.weight"] = lora.down.weight
            tensors[f"{full}.lora_B.weight"] = lora.up.weight
    return {
        "peft_type": "LORA",
        "r": adapter.lora_rank,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed == {True},
        "target_modules": targets,
    }, tensors


def _prefix(model: Decoder, family: Family) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, length = model.config, adapter_of(model).prefix_length
    if config.positions != "rope":
        raise UsageError(
            f"adapter.kind prefix with model.positions {config.positions}: peft's prefix shifts the positions of the "
            "tokens, which this model would see; only rotary positions are exported"
        )
    if config.attention.window is not None:
        raise UsageError(
            "adapter.kind prefix with model.attention.window: peft's prefix is a part of the window, which leaves it "
            "behind, and this model's queries always see it; only models without a window are exported"
        )
    # Behind peft's prefix tokens stand at t + P, and queries turn by as much: keys turn with them.
    at = model.positions.place(1, torch.device("cpu"), first=length)
    assert isinstance(at, Placement)
    parts = []
    for block in model.blocks:
        keys = cast(PrefixKeys, cast(Attention, block.attn).adapter_keys)
        parts += [rotate(keys.key.detach()[None], at.rotation)[0], keys.value.detach()]
    # [2L, G, P, K] → [P, 2L·G·K]
    stacked = torch.stack(parts).permute(2, 0, 1, 3).flatten(1)
    return {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": length,
        "token_dim": config.kv_heads * config.d_head,
        "num_attention_heads": config.kv_heads,
        "num_layers": config.n_layers,
        "num_transformer_submodules": 1,
        "encoder_hidden_size": config.kv_heads * config.d_head,
        "prefix_projection": False,
    }, {"prompt_embeddings": stacked}


#: Kinds of ``peft`` → functions that give settings and tensors of a model's adapter.
_KINDS = {"lora": _lora, "prefix": _prefix}
