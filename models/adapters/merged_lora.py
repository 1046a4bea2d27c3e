"""A LoRA added to the weights that it stands beside: the same function, and no adapter any more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import UsageError
from ..decoder import Decoder
from ..init import Linear
from .attach import adapter_of, is_adapter
from .lora import Lora


@torch.no_grad()
def merged(model: Decoder) -> Mapping[str, Tensor]:
    """Every parameter and buffer of the model by name, with the products of its LoRA added to weights.

    Raises:
        UsageError: another kind of adapter, which no weights of the model are.
    """
    if (kind := adapter_of(model).kind) != "lora":
        raise UsageError(f"--merge: adapter.kind is {kind}, and no weights of the model do what it does; leave it out")
    found: dict[str, Tensor] = {name: x for name, x in model.state_dict().items() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, Lora):
            found[f"{prefix}.weight"] = module.weight + module.adapter.product()
    return found
