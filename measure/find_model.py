"""Search for the language model in a user's training, and check that it can be measured."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from ..models.decoder import Decoder
from .hf import HFModel
from .hf.observed_pass import refusing
from .ranks import max_over_ranks


def unwrap(model: Any) -> Any:
    """Remove the wrappers of training from ``model``: ``torch.compile``, Fabric, DeepSpeed, those of several
    devices.
    """
    while True:
        # Fabric's module casts inputs and opens autocast around the module that was given to it.
        is_wrapper = isinstance(model, DistributedDataParallel | nn.DataParallel) or hasattr(model, "_forward_module")
        # Importing DeepSpeed takes seconds.
        is_wrapper |= any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
        inner = model.module if is_wrapper else getattr(model, "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def measurable(model: Any) -> Decoder | HFModel:
    """Return an unwrapped model in the form that ``measure`` reads. Collective: call on every rank.

    Raises:
        UsageError: no language model, one that cannot be measured or has no values, or one under FSDP 1.
    """
    if isinstance(model, Decoder | HFModel):
        return model
    is_flat = _lies_flat(model)
    # All ranks must refuse together: the others would wait.
    if max_over_ranks(int(is_flat)):
        raise UsageError(
            f"the parameters of this {type(model).__name__} lie flat in those of FSDP 1, where they cannot be read one "
            "by one; shard it with FSDP 2, or measure its checkpoints with birthmark snapshot"
        )
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise UsageError(f"{type(model).__name__} is no language model of transformers, and cannot be measured")
    # Modules whose weights accelerate keeps elsewhere have its hook.
    fetched = any(hasattr(module, "_hf_hook") for module in model.modules())
    empty = next((name for name, p in model.named_parameters() if p.is_meta and not fetched), None)
    if empty is not None:
        raise UsageError(
            f"{type(model).__name__} is not measured: {empty} is on the meta device, without values; load the weights "
            "first"
        )
    with refusing(model):
        return HFModel(model)


def _lies_flat(model: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, nn.Module):
        return False
    # FSDP 1 leaves an empty parameter if another rank holds the values. ZeRO 3 does too, but gathers it in a pass.
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return flat or any(p.numel() == 0 and not hasattr(p, "ds_tensor") for p in model.parameters())


def find_language_model(module: nn.Module) -> nn.Module:
    """Return the one language model in a module (a LightningModule): a decoder, or a model of ``transformers``.

    Raises:
        UsageError: there is none, or there are several.
    """
    if isinstance(own := getattr(module, "model", None), Decoder):
        return own
    found = _pretrained_in(module)
    if len(found) == 1:
        return next(iter(found.values()))
    what = f"several models of transformers ({', '.join(found)})" if found else "no model of transformers"
    name = next(iter(found), "model")
    raise UsageError(
        f"{type(module).__name__} holds {what}: say which to measure, "
        f"BiasSnapshot(model=lambda module: module.{name}, …)"
    )


def _pretrained_in(module: nn.Module) -> dict[str, nn.Module]:
    """Return models of ``transformers``, or of ``peft`` around them, by the path of the attribute, without those inside
    of others.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return {}
    kinds: tuple[type[nn.Module], ...] = (PreTrainedModel,)
    if "peft" in sys.modules:  # else no module is its own
        kinds += (sys.modules["peft"].PeftModel,)
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(child, kinds) and not inside:
            found[name] = child
    return {name.replace("._orig_mod", ""): child for name, child in found.items()}
