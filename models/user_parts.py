"""Trial of the parts of attention that are a user's, before a run: at no position may they read a later one, in no
sequence another, and nothing may stay from call to call.

A part that does trains all the same, one that looks ahead to a loss that no causal model reaches. So an input changes,
and the part's outputs at earlier positions and in other sequences must stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .attention.attention import Attention, attention_of
from .attention.correlation import estimated_correlations
from .attention.normalisers import WeightedSum
from .attention.positions import POSITIONS, Placement
from .attention.scores import Scores
from .birth import initialize_parameters
from .config import ModelConfig
from .user_classes import name_in_config

#: Positions of the trial at most, behind those of a prefix.
_POSITIONS = 1024
#: Differences up to this share of a channel's largest output are rounding, as of sums in another order.
_ROUNDING = 1e-5
#: Size of the normal noise on the parts' parameters in the second try: what one multiplies that starts at 0 is hidden.
_NOISE = 0.1


@torch.no_grad()
def check_user_parts(config: ModelConfig, device: torch.device | str = "cpu") -> None:
    """Raise UsageError if a user's part of attention reads later positions, or other sequences of its batch; also if it
    changes its input, keeps something from one call to the next, or gives numbers of another type.

    Every kind of block is tried alone, newborn and then with noise on the parameters of its parts, in float32, on two
    sequences of random input as long as the run's. Outputs that are not finite are not judged. Random numbers that a
    part draws from torch are the same in every pass; the random state stays as it was.

    Args:
        config: the model.
        device: device of the run: a part may have kernels for no other.
    """
    device, tried = torch.device(device), set()
    for block in range(config.n_layers if config.attention.user_parts else 0):
        with torch.device("meta"):
            attention = attention_of(config)(config, block)
            positions = POSITIONS[config.positions](config)
        kind = tuple(map(type, _users_parts(attention)))
        if kind in tried:
            continue
        tried.add(kind)
        initialize_parameters(nn.ModuleList([attention, positions]).to_empty(device=device), config, init_seed=0)
        n_prefix = config.attention.prefix or 0
        n_positions = min(n_prefix + _POSITIONS, config.max_seq_len)
        # Half of them: a sum over all shows many changes better than one. From an odd one: a part may read chunks.
        first_changed = min(n_prefix + (n_positions - n_prefix) // 4 * 2 + 1, n_positions)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _try(attention, positions.place(n_positions, device), n_positions, first_changed, config.d_model)


def _users_parts(attention: Attention) -> list[nn.Module]:
    """List the parts of attention that are a user's; a block that the aggregation leaves out has a built-in one."""
    parts = {"normaliser": attention.normaliser, "aggregation": attention.aggregate, "gate": attention.gate}
    return [part for field, part in parts.items() if field in attention.user_parts]


def _try(attention: Attention, place: Placement, n_positions: int, first_changed: int, d_model: int) -> None:
    device, generator = attention.o.weight.device, torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x_BTD = drawn(2, n_positions, d_model)
    later_BTD, other_BTD = x_BTD.clone(), x_BTD.clone()
    later_BTD[:, first_changed:] = drawn(2, n_positions - first_changed, d_model)
    other_BTD[1] = drawn(n_positions, d_model)
    for noise in (0.0, _NOISE):
        for parameter in nn.ModuleList(_users_parts(attention)).parameters() if noise else ():
            parameter.add_(noise * drawn(*parameter.shape))
        for estimate in estimated_correlations(attention):
            estimate.reset()
        # The first pass in training gives estimates their moments, as a birth does.
        _outputs(attention.train(), x_BTD, place)
        resumed = {name: value.clone() for name, value in attention.state_dict().items()}
        outputs = _outputs(attention.eval(), x_BTD, place)
        _outputs(attention.train(), other_BTD, place)
        attention.load_state_dict(resumed)
        _require_alike(
            outputs,
            _outputs(attention.eval(), x_BTD, place),
            ...,
            "for the same input and parameters changes from call to call, so that no resumed run goes on as it was; "
            "keep nothing between calls, and draw from torch alone",
        )
        _require_alike(
            outputs,
            _outputs(attention, later_BTD, place),
            (..., slice(first_changed), slice(None)),
            "at a position changes with a later one, so that a model would see the tokens that it predicts; read no "
            "position after a query's own",
        )
        _require_alike(
            outputs,
            _outputs(attention, other_BTD, place),
            0,
            "for a sequence changes with another one of the batch; read each sequence by itself",
        )


def _require_alike(
    outputs: list[tuple[nn.Module, Tensor]], others: list[tuple[nn.Module, Tensor]], where: Any, words: str
) -> None:
    """Raise UsageError with these words for the first part whose outputs of two passes differ in a place."""
    for (part, before), (_, after) in zip(outputs, others, strict=True):
        if _differ(before, after)[where].any():
            raise UsageError(f"{name_in_config(part)}: its output {words}")


def _outputs(attention: Attention, x_BTD: Tensor, place: Placement) -> list[tuple[nn.Module, Tensor]]:
    """Return the parts of attention with their outputs ``[B, …, T, C]`` for an input, in the order of the pass."""
    found: list[tuple[nn.Module, Tensor]] = []
    versions: list[list[int]] = []

    def look(part: nn.Module, given: tuple[object, ...]) -> None:
        versions.append([tensor._version for tensor in _tensors(given)])

    def note(part: nn.Module, given: tuple[object, ...], made: Tensor | WeightedSum) -> None:
        output = made.o_BHTK if isinstance(made, WeightedSum) else made
        if not isinstance(output, Tensor):
            return  # which attention refuses
        found.append((part, output.clone()))
        if versions.pop() != [tensor._version for tensor in _tensors(given)]:
            raise UsageError(
                f"{name_in_config(part)}: changes its input in place, which others read; give a new tensor"
            )
        if output.dtype != x_BTD.dtype:
            raise UsageError(
                f"{name_in_config(part)}: gives {_word(output.dtype)} for {_word(x_BTD.dtype)}, and the model would go "
                "on in it; give the type of what it gets, as by .to(o_BHTK.dtype)"
            )

    parts = _users_parts(attention)
    hooks = [part.register_forward_pre_hook(look) for part in parts]
    hooks += [part.register_forward_hook(note) for part in parts]
    torch.manual_seed(0)
    try:
        attention(x_BTD.clone(), place)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _tensors(given: Iterable[object]) -> Iterator[Tensor]:
    """Give the tensors that a part is called with."""
    for one in given:
        if isinstance(one, Scores):
            yield from (one.q_BHTK, one.k_BGSK)
        elif isinstance(one, WeightedSum):
            yield one.o_BHTK
        elif isinstance(one, Tensor):
            yield one


def _differ(before: Tensor, after: Tensor) -> Tensor:
    """Mark the elements of outputs ``[B, …, T, C]`` that differ by more than rounding."""
    size = before.abs().nan_to_num(0.0, 0.0, 0.0).amax((0, -2), keepdim=True)
    return (before - after).abs() > _ROUNDING * size


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
