"""LoRA merged into the weights beside it: the same function, without an adapter."""

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
    """Return every parameter and buffer of the model by name, with the LoRA products added to weights.

    Raises:
        UsageError: another kind of adapter, which weights of the model cannot express.
    """
    if (kind := adapter_of(model).kind) != "lora":
        raise UsageError(f"--merge: adapter.kind is {kind}, and no weights of the model do what it does; leave it out")
    found: dict[str, Tensor] = {name: x for name, x in model.state_dict().items() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, Lora):
            found[f"{prefix}.weight"] = module.weight + module.adapter.product()
    return found
