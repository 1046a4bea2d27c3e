"""Causality of parts of a user's own: at no position may they read a later one, and in no sequence another.

A part that does trains all the same, to a loss that no causal model reaches. So each is tried before a run: an input
changes, and what the part gives at earlier positions and in other sequences must stay as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .attention.attention import Attention, attention_of
from .attention.correlation import estimated_correlations
from .attention.normalisers import WeightedSum
from .attention.positions import POSITIONS, Placement
from .birth import initialize_parameters
from .config import ModelConfig
from .user_classes import name_in_config

#: Positions of the trial, behind those of a prefix: a mean over so few shows each of them far above rounding.
_POSITIONS = 16
#: Differences up to this share of the largest output are rounding, as of sums in another order.
_ROUNDING = 1e-5
#: Size of the normal noise on the parts' parameters in the second try: what one multiplies that starts at 0 is hidden.
_NOISE = 0.1


@torch.no_grad()
def check_causal(config: ModelConfig, device: torch.device | str = "cpu") -> None:
    """Raise UsageError if a user's part of attention reads later positions, or other sequences of its batch.

    Every kind of block is tried alone, newborn and then with noise on the parameters of its parts, in float32, on two
    sequences of random input. Outputs that are not finite are not judged.

    Args:
        config: the model.
        device: device of the run: a part may have kernels for no other.
    """
    device, tried = torch.device(device), set()
    for block in range(config.n_layers if config.attention.user_parts else 0):
        with torch.device("meta"):
            attention = attention_of(config)(config, block)
            positions = POSITIONS[config.positions](config)
        kind = tuple(map(type, _parts(attention)))
        if kind in tried:
            continue
        tried.add(kind)
        initialize_parameters(nn.ModuleList([attention, positions]).to_empty(device=device), config, init_seed=0)
        n_positions = min((config.attention.prefix or 0) + _POSITIONS, config.max_seq_len)
        _try(attention, positions.place(n_positions, device), n_positions, config.d_model)


def _parts(attention: Attention) -> list[nn.Module]:
    """List the parts of attention that may be a user's."""
    return [attention.normaliser, attention.aggregate, attention.gate]


def _try(attention: Attention, place: Placement, n_positions: int, d_model: int) -> None:
    device, generator = attention.o.weight.device, torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x_BTD = drawn(2, n_positions, d_model)
    later_BTD, other_BTD = x_BTD.clone(), x_BTD.clone()
    later_BTD[:, -1] = drawn(2, d_model)
    other_BTD[1] = drawn(n_positions, d_model)
    for noise in (0.0, _NOISE):
        for parameter in nn.ModuleList(_parts(attention)).parameters() if noise else ():
            parameter.add_(noise * drawn(*parameter.shape))
        for estimate in estimated_correlations(attention):
            estimate.reset()
        # The first pass in training gives estimates their moments, as a birth does.
        attention.train()(x_BTD, place)
        outputs = _outputs(attention.eval(), x_BTD, place)
        for (part, before), (_, after) in zip(outputs, _outputs(attention, later_BTD, place), strict=True):
            if _differ(before[..., :-1, :], after[..., :-1, :]):
                raise UsageError(
                    f"{name_in_config(part)}: its output at a position changes with a later one, so that a model would "
                    "see the tokens that it predicts; read no position after a query's own"
                )
        for (part, before), (_, after) in zip(outputs, _outputs(attention, other_BTD, place), strict=True):
            if _differ(before[0], after[0]):
                raise UsageError(
                    f"{name_in_config(part)}: its output for a sequence changes with another one of the batch; read "
                    "each sequence by itself"
                )


def _outputs(attention: Attention, x_BTD: Tensor, place: Placement) -> list[tuple[nn.Module, Tensor]]:
    """Return the parts of attention with their outputs ``[B, …, T, C]`` for an input, in the order of the pass."""
    found: list[tuple[nn.Module, Tensor]] = []

    def note(part: nn.Module, _: object, given: Tensor | WeightedSum) -> None:
        found.append((part, (given.o_BHTK if isinstance(given, WeightedSum) else given).clone()))

    hooks = [part.register_forward_hook(note) for part in _parts(attention)]
    try:
        attention(x_BTD, place)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _differ(before: Tensor, after: Tensor) -> bool:
    return bool(((before - after).abs() > _ROUNDING * before.abs().max()).any())
