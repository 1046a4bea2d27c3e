"""Effect of an intervention in a sentence: a sink formed or did not; an existing one stayed or vanished."""

from __future__ import annotations

import numpy as np

from ..measure.intervention_kinds import Ablation, Intervention
from ..measure.interventions import Intervened
from ..models.observe import in_ranges
from .formatting import in_prose
from .thresholds import threshold

#: A share of key 0's attention from which another key gets as much.
_AS_MUCH = 0.8


def intervention_in_words(what: Intervention) -> str:
    """Put an intervention in words: ``mask of position 20 in blocks 1–12``."""

    def counted(noun: str, numbers: tuple[int, ...]) -> str:
        return f"{noun}{'s' if len(numbers) > 1 else ''} {in_ranges(numbers)}"

    named = {"unit": what.units, "channel": what.channels, "head": what.heads}
    things = [counted(noun, numbers) for noun, numbers in named.items() if numbers]
    places = [counted("position", what.positions)] if what.positions else []
    kind = what.kind.partition("_")[0] + (" value" if what.kind == "ablate_value" else "")
    kind = "matched scale" if what.matched else kind
    return " ".join([kind, *things, *(["at", *places] if places else []), "in", counted("block", what.layers)])


def strongest_pass(found: Intervened) -> int:
    """Return the number of the pass whose attention to the watched keys is farthest from that of the unchanged
    model.
    """
    means = np.array([np.nanmean(figures.attention) for figures in found.passes])
    return 1 + int(np.argmax(np.abs(means[1:] - means[0])))


def dose_in_words(found: Intervened, number: int) -> str:
    """Name a pass: ``alone``, a dose, or the kind if there is only one dose."""
    kind, dose = found.what.means, found.passes[number].dose
    return "alone" if dose is None else f"λ {dose:g}" if "lambdas" in kind.options else "changed"


def intervention_sentence(found: Intervened) -> str:
    """Describe the effect of the strongest dose on every watched key, as means over blocks and heads, and on
    the loss.
    """
    number = strongest_pass(found)
    parts = [_of_key(found, number, i) for i in range(len(found.keys))]
    loss, increase = found.loss(number), found.loss_increase(number)
    before = found.loss(0)
    if loss is not None and before is not None and increase is not None:
        sign = "+" if increase[0] >= 0 else ""
        parts.append(
            f"The loss goes from {in_prose(before[0], 2)} to {in_prose(loss[0], 2)} nats per token "
            f"({sign}{in_prose(increase[0])} ± {in_prose(increase[1])})."
        )
    return " ".join(parts)


def _of_key(found: Intervened, number: int, i: int) -> str:
    alone, changed = found.passes[0], found.passes[number]
    key, level = found.keys[i], threshold("intervened_sink") * found.uniform[i]
    before, after = (float(np.nanmean(figures.attention[..., i])) for figures in (alone, changed))
    first_before, first_after = (float(np.nanmean(f.attention_to_first[..., i])) for f in (alone, changed))
    at = f", at {dose_in_words(found, number)}" if len(found.passes) > 2 else ""
    moved = f"from {in_prose(before)} to {in_prose(after)}{at}"
    beside = ""
    if key:
        beside = f"; key 0 gets {in_prose(first_after)} (before {in_prose(first_before)})"
        if after >= _AS_MUCH * first_after and after >= level:
            beside = f", as much as to key 0 ({in_prose(first_after)}, before {in_prose(first_before)})"
    if before < level <= after:
        return f"A sink forms at {key}: attention to it goes {moved}{beside}."
    if before >= level > after:
        return f"The sink at {key} goes: attention to it falls {moved}{beside}."
    if before < level:
        none = "There is no sink" if isinstance(found.what.means, Ablation) else "No sink forms"
        return f"{none} at {key}: attention to it goes {moved}{beside}."
    share = after / before
    how = "stays" if 0.75 <= share <= 4 / 3 else "weakens" if share < 1 else "grows"
    return f"The sink at {key} {how}: attention to it goes {moved}{beside}."
