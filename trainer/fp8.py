"""Matrix products of the blocks' linear maps in fp8, as torchao computes them.

Each map stays the same module, with its name, weight and birth: only its training pass uses another function. Tables,
head, norms and attention stay in bf16, as in torchtitan; so do routers and gates, whose outputs steer other parts, and
all measurements.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..models.attention.attention import LinearGate
from ..models.decoder import Decoder
from ..models.experts.routed_mlp import Mixture
from ..models.init import Linear
from ..models.norms import NormGate

#: GPUs multiply fp8 from this compute capability on.
CAPABILITY = (8, 9)

#: Divisor of the sides of a product.
_MULTIPLE = 16


def fp8_problem(device: torch.device) -> str | None:
    """Say why fp8 is not available, with the remedy; None if it is."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return "needs a GPU of compute capability 8.9 or more (H100, L40S, RTX 4090): give bf16"
    if importlib.util.find_spec("torchao") is None:
        return "needs torchao: pip install torchao, or give bf16"
    return None


def _deciding_maps(model: Decoder) -> set[nn.Module]:
    """Return the maps of routers and gates, including gates of norms."""
    routers: set[nn.Module] = {module.router for module in model.modules() if isinstance(module, Mixture)}
    gates = (module for module in model.modules() if isinstance(module, (LinearGate, NormGate)))
    return routers.union(*(gate.modules() for gate in gates))


def use_fp8(model: Decoder, *, emulate: bool = False) -> None:
    """Let training passes of the blocks' linear maps multiply in fp8: weights, inputs and gradients scaled by their
    largest elements. Maps with a side that is no multiple of 16 stay as they are, and so do routers and gates.

    Args:
        model: the model; its weights may be sharded: a pass multiplies with the gathered ones.
        emulate: round to fp8, and multiply in the inputs' dtype: on devices that have no fp8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Padded, since the tokens of a micro-batch are a side too.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    deciding = _deciding_maps(model)
    for module in model.blocks.modules():
        if not isinstance(module, Linear) or module in deciding:
            continue
        if module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0:
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            in_fp8 = convert_to_float8_training(nn.Sequential(plain), config=config)[0]
            # On the instance: a strategy may exchange the class.
            module.product = partial(_product, module, in_fp8)  # type: ignore[method-assign]


def _product(linear: Linear, in_fp8: nn.Module, x: Tensor) -> Tensor:
    """Multiply in fp8 in training; otherwise use the map's own product."""
    # An expert without tokens gets no rows, which have no largest element.
    if not linear.training or x.numel() == 0:
        return Linear.product(linear, x)
    # Asked for now: a sharded weight is another tensor in each pass.
    product: Tensor = functional_call(in_fp8, dict(linear.named_parameters(recurse=False)), (x.contiguous(),))
    return product
