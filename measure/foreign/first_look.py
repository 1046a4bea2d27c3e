"""What of a model of ``transformers`` can be seen, from one sequence; and whether it computes the same while it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...models.observe import Attended, Site, Sublayer, Unseen, UnseenPlace
from .family_places import FamilyPlaces
from .observed_pass import find

#: How far a place of an observed pass may be from the model's own, over its standard deviation. In half precision
#: another kernel alone moves it by some per cent.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.3
_NO_ROW = "a model type without a row in Birthmark's table"
_OUTPUTS: tuple[tuple[Sublayer, UnseenPlace], ...] = (("attention", "attention_output"), ("mlp", "mlp_output"))


@dataclass
class Record:
    """An observer that keeps one sequence's residual stream, in the order of the pass, and the shapes of the rest."""

    stream: dict[tuple[Site, int], Tensor] = field(default_factory=dict)
    attentions: list[tuple[int, tuple[int, int, int]]] = field(default_factory=list)
    """Of each: block, heads, and widths of queries and of values."""
    n_units: dict[int, int] = field(default_factory=dict)
    outputs: set[tuple[Sublayer, int]] = field(default_factory=set)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        self.stream[site, layer] = h_BTD.detach().clone()

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        q_BHTK = attended.q_BHTK
        self.attentions.append((layer, (q_BHTK.shape[1], q_BHTK.shape[-1], attended.o_BHTK.shape[-1])))

    def sublayer(self, site: Sublayer, layer: int, x_BTD: Tensor) -> None:
        """See models/observe.py."""
        self.outputs.add((site, layer))

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""
        self.n_units[layer] = a_BTF.shape[-1]


class Passed(NamedTuple):
    """One pass over one sequence."""

    record: Record
    logits: Tensor


def difference(own: Passed, observed: Passed, dtype: torch.dtype, has_experts: Callable[[int], bool]) -> str | None:
    """Where an observed pass first differs from the model's own, in words; None where it does not.

    Behind experts a difference says nothing: rounding alone may send a token to another one. What is after the
    attention before them is the same all the same.
    """
    places = [(f"after the {site} of block {layer}", h) for (site, layer), h in own.record.stream.items() if layer]
    theirs = [h for (_, layer), h in observed.record.stream.items() if layer]
    layers = [layer for _, layer in own.record.stream if layer]
    sites = [site for site, layer in own.record.stream if layer]
    for (name, a), b, layer, site in zip(places, theirs, layers, sites, strict=True):
        if (off := _off(a, b, dtype)) is not None:
            if site == "mlp" and has_experts(layer):
                return None
            return f"{name.replace('mlp', 'MLP')}, where the residual stream is off by {off:.2g}"
    off = _off(own.logits, observed.logits, dtype)
    return None if off is None else f"in the logits, which are off by {off:.2g}"


def _off(own: Tensor, observed: Tensor, dtype: torch.dtype) -> float | None:
    """How many standard deviations a tensor is off, where that is too many."""
    wide = torch.promote_types(own.dtype, torch.float32)
    own, observed = own.to(wide), observed.to(wide)
    worst, scale = (observed - own).abs().max(), own.std()
    # What is not finite is refused by the measurement, which knows where it comes from.
    if worst > _TOLERANCE.get(dtype, _TOLERANCE_HALF) * scale + 1e-6:
        return float(worst / scale)
    return None


def unseen_places(
    record: Record, blocks: Sequence[nn.Module], places: FamilyPlaces | None, shape: tuple[int, int, int], n_units: int
) -> tuple[Unseen, ...]:
    """The places that an observed pass did not show.

    Args:
        record: of the pass.
        blocks: of the model.
        places: names of modules, where they are known.
        shape: query heads, and the widths of their queries and values.
        n_units: hidden units of a block's MLP.

    Raises:
        UsageError: the heads are not those of the model's config.
    """
    layers = range(1, len(blocks) + 1)
    calls = Counter(layer for layer, _ in record.attentions)
    if wrong := [found for found in record.attentions if found[1] != shape]:
        layer, found = wrong[0]
        raise UsageError(
            f"block {layer} has {found[0]} heads of width {found[1]} and {found[2]}, the model's config says "
            f"{shape[0]} of {shape[1]} and {shape[2]}; it cannot be measured"
        )
    why: dict[tuple[UnseenPlace, str], list[int]] = {}
    for layer, block in zip(layers, blocks, strict=True):
        if calls[layer] != 1:
            reason = "several in a block" if calls[layer] else _why_no_attention(block, places)
            why.setdefault(("attention", reason), []).append(layer)
        if record.n_units.get(layer) != n_units or not n_units:
            why.setdefault(("neurons", _why_no_units(block, record.n_units.get(layer), places)), []).append(layer)
        if ("attention", layer) not in record.stream:
            why.setdefault(("after_attention", _NO_ROW), []).append(layer)
        for site, place in _OUTPUTS:
            if (site, layer) not in record.outputs:
                reason = _NO_ROW if places is None else "its last map is not in Birthmark's table"
                why.setdefault((place, reason), []).append(layer)
    return tuple(Unseen(place, tuple(of), reason) for (place, reason), of in why.items())


def has_experts(block: nn.Module) -> bool:
    """Whether a block's MLP is a mixture of experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in block.named_modules())


def _why_no_attention(block: nn.Module, places: FamilyPlaces | None) -> str:
    if places is not None and find(block, places.attn) is None:
        return "it has no matrix of weights"
    return "it does not run through the attention interface of transformers"


def _why_no_units(block: nn.Module, n_units: int | None, places: FamilyPlaces | None) -> str:
    if n_units is not None:
        return f"there are {n_units} of them, in other blocks another number"
    if has_experts(block):
        return "a mixture of experts"
    return _NO_ROW if places is None else "no dense MLP"
