"""Gains of the norms through which the maps of a model of ``transformers`` read its residual stream.

The norm before a map is found in a pass: it is the one whose output the map receives. So families need no table.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .foreign_model import ForeignModel
from .observed_pass import first_of


@torch.no_grad()
def gains_before(model: ForeignModel) -> tuple[dict[int, Tensor], Tensor | None]:
    """Return gains ``[D]``, float32 on their norm's device, of the norm before each block's MLP, by block from 1, and
    before the language-model head. A map that does not read a norm's output has none.
    """
    readers: dict[int | None, nn.Module] = {None: model.model.get_output_embeddings()}
    readers.update(model.mlp_readers().items())
    given: list[tuple[Tensor, nn.Module]] = []
    before: dict[int | None, nn.Module] = {}

    def gave(module: nn.Module, args: Any, output: Any) -> None:
        given.append((first_of(output), module))

    def reads(layer: int | None, module: nn.Module, args: Any) -> None:
        # The head may read the last position alone: a view of the norm's output.
        where = args[0].untyped_storage().data_ptr()
        found = [norm for output, norm in given if output.untyped_storage().data_ptr() == where]
        if found:
            before[layer] = found[-1]

    with ExitStack() as stack:
        for module in model.model.modules():
            if _is_norm(module, model.config.d_model):
                stack.callback(module.register_forward_hook(gave).remove)
        for layer, module in readers.items():
            stack.callback(module.register_forward_pre_hook(partial(reads, layer)).remove)
        model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), last_only=True)
    gains = {layer: _gain(norm, model.config.d_model) for layer, norm in before.items()}
    head = gains.pop(None, None)
    return {layer: gain for layer, gain in gains.items() if layer is not None}, head


def _is_norm(module: nn.Module, width: int) -> bool:
    """Return True if a module holds vectors of the stream's width and nothing else."""
    own = list(module.parameters())
    return bool(own) and all(tuple(parameter.shape) == (width,) for parameter in own)


def _gain(norm: nn.Module, width: int) -> Tensor:
    """Return the factor of a norm: some families store the gain less 1. The test input, alternating ±1, has mean 0 and
    mean square 1.
    """
    weight, hook = next(norm.parameters()), getattr(norm, "_hf_hook", None)
    # Weights that accelerate keeps elsewhere are on the meta device, between passes.
    device = torch.device(hook.execution_device) if weight.is_meta and hook is not None else weight.device
    signs_11D = torch.ones(1, 1, width, dtype=weight.dtype, device=device)
    signs_11D[..., 1::2] = -1
    gain_11D: Tensor = (norm(signs_11D) - norm(-signs_11D)) / 2 * signs_11D
    return gain_11D.flatten().float()
