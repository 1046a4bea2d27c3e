"""Places that a model of ``transformers`` shows, found from one sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ...errors import UsageError
from ...models.observe import Attended, Site, Sublayer, Unseen, UnseenPlace
from .family_places import FamilyPlaces
from .observed_pass import find

_NO_ROW = "a model type without a row in Birthmark's table"
_OUTPUTS: tuple[tuple[Sublayer, UnseenPlace], ...] = (("attention", "attention_output"), ("mlp", "mlp_output"))


@dataclass
class Record:
    """Observer that records the places that a pass shows, and their shapes."""

    stream: set[tuple[Site, int]] = field(default_factory=set)
    attentions: list[tuple[int, tuple[int, int, int]]] = field(default_factory=list)
    """Block, heads, and widths of queries and of values, for each attention."""
    n_units: dict[int, int] = field(default_factory=dict)
    outputs: set[tuple[Sublayer, int]] = field(default_factory=set)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        self.stream.add((site, layer))

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


def unseen_places(
    record: Record, blocks: Sequence[nn.Module], places: FamilyPlaces | None, shape: tuple[int, int, int], n_units: int
) -> tuple[Unseen, ...]:
    """List the places that an observed pass did not show.

    Args:
        record: record of the pass.
        blocks: blocks of the model.
        places: names of modules, if known.
        shape: query heads, and the widths of their queries and values.
        n_units: hidden units of a block's MLP.

    Raises:
        UsageError: the heads differ from the model's config.
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


def _has_experts(block: nn.Module) -> bool:
    """Return True if a block's MLP is a mixture of experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in block.named_modules())


def _why_no_attention(block: nn.Module, places: FamilyPlaces | None) -> str:
    if places is not None and find(block, places.attn) is None:
        return "it has no matrix of weights"
    return "it does not run through the attention interface of transformers"


def _why_no_units(block: nn.Module, n_units: int | None, places: FamilyPlaces | None) -> str:
    if n_units is not None:
        return f"there are {n_units} of them, in other blocks another number"
    if _has_experts(block):
        return "a mixture of experts"
    return _NO_ROW if places is None else "no dense MLP"
