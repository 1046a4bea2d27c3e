"""LoRA: the product of two thin matrices beside a linear map (arXiv 2106.09685)."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from ..config import InitConfig
from ..decoder import Decoder
from ..init import Constant, Distribution, Linear, Normal
from .adapter_config import AdapterConfig


class LoraDown(Linear):
    """Map to the inner width. Drawn with 1/√fan-in, whatever the model's initialiser."""

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"weight": Normal(self.in_features**-0.5)}


class LoraUp(Linear):
    """Map from the inner width. Starts at 0, so that the product does."""

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"weight": Constant(0.0)}


class Lora(nn.Module):
    """``alpha/rank · B A x`` (arXiv 2106.09685, section 4.1); 0 at the start."""

    def __init__(self, adapter: AdapterConfig, linear: Linear) -> None:
        super().__init__()
        self.scale = adapter.lora_alpha / adapter.lora_rank
        self.down = LoraDown(linear.in_features, adapter.lora_rank, bias=False)
        self.up = LoraUp(adapter.lora_rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in] → […, out]``."""
        product: Tensor = self.up(self.down(x)) * self.scale
        return product

    def product(self) -> Tensor:
        """Return the matrix that it adds to the map's weight, ``[out, in]``."""
        return self.up.weight @ self.down.weight * self.scale


def attach_lora(model: Decoder, adapter: AdapterConfig) -> None:
    """Put a LoRA beside each map that ``adapter.maps`` names, in every block."""
    for block in model.blocks:
        for name in adapter.lora_maps:
            linear = cast(Linear, block.get_submodule(name))
            linear.adapter = Lora(adapter, linear)
