"""Adapters by name: attachment to a decoder, which is frozen, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..attention.correlation import estimated_correlations
from ..birth import digest_of, draw
from ..config import InitConfig
from ..decoder import Decoder
from ..init import birth_plan
from ..tensor_shards import shard_of
from .adapter_config import AdapterConfig
from .lora import attach_lora
from .prefix import attach_prefix
from .prefix_plus import attach_prefix_plus

#: Functions that attach an adapter, by ``adapter.kind``.
ADAPTERS: dict[str, Callable[[Decoder, AdapterConfig], None]] = {
    "lora": attach_lora,
    "prefix": attach_prefix,
    "prefix_plus": attach_prefix_plus,
}


#: Attribute of a decoder that has one: the decoder's own sources, which leave with exported models, know of none.
_ATTACHED = "attached_adapter"


def is_adapter(name: str) -> bool:
    """Return True if a decoder's tensor belongs to an adapter, by its full name."""
    return any(part.startswith("adapter") for part in name.split("."))


def attach(model: Decoder, adapter: AdapterConfig) -> None:
    """Attach an adapter, whose parameters have no values yet, and freeze all else: weights, and moments that training
    would move.

    Args:
        model: the model, on any device; before it is sharded.
        adapter: adapter to attach; ``none`` leaves the model as it is.
    """
    if not adapter.is_on:
        return
    model.requires_grad_(False)
    for part in estimated_correlations(model):
        part.frozen = True
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    with torch.device(device):
        ADAPTERS[adapter.kind](model, adapter)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
    setattr(model, _ATTACHED, adapter)


def adapter_of(model: nn.Module) -> AdapterConfig:
    """Return the config of the adapter on a model of any kind; ``none`` without one."""
    found = getattr(model, _ATTACHED, AdapterConfig())
    assert isinstance(found, AdapterConfig)
    return found


@torch.no_grad()
def initialize_adapter(model: Decoder, init: InitConfig, init_seed: int) -> None:
    """Overwrite every parameter of the adapter with its initial value under ``init_seed``. Each rank of a sharded
    adapter draws its shard. Values are keyed as at a birth: by the parameter's name.
    """
    if not adapter_of(model).is_on:
        return
    plan = birth_plan(model, init)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            shard = shard_of(parameter)
            drawn = draw(init_seed, name, shard.numel, plan[name], shard.start, shard.stop)
            shard.local.copy_(torch.from_numpy(drawn))


def base_digest(model: nn.Module) -> str:
    """Return the SHA-256 over the parameters and buffers of the model beneath an adapter, in the form of a birth
    digest.

    Collective: call on every rank if the model is sharded. Gathers one parameter at a time.
    """
    named = sorted([*model.named_parameters(), *model.named_buffers()])
    return digest_of((name, tensor) for name, tensor in named if not is_adapter(name))
