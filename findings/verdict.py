"""A verdict on a run, and how questions read the run's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, Literal

import numpy as np

from ..files import finite_or_nan
from ..measure.records import Snapshot
from ..metrics.quantities import MEASURED
from .history import RunHistory

Tone = Literal["present", "weak", "absent", "unclear"]
"""Whether an effect is there. ``weak`` is a trace, beyond chance; ``unclear`` is more than the numbers can tell."""

Group = Literal["bias", "bias_text", "bias_bos", "bias_text_without_bos"]


#: Group of scalars → prefix of the arrays of the same probe.
_PREFIXES: Mapping[Group, str] = {
    "bias": "",
    "bias_text": "text.",
    "bias_bos": "bos.",
    "bias_text_without_bos": "text_without_bos.",
}


@dataclass(frozen=True)
class Verdict:
    """One sentence about a run, and the numbers that it was made of."""

    key: str
    """Its name: one for every question."""
    sentence: str
    tone: Tone
    """Whether what it is about is there."""
    steps: list[int]
    """Steps of ``values``."""
    values: list[float]
    """What it judges over training; NaN where a step has no number."""
    control: list[float] | None
    """What that is judged against at the same steps; None where there is no control."""
    section: str
    """Section of the page that shows it in full; "" for none."""
    headline: bool = True
    """Whether it stands on the first screen; the others say what their section shows."""

    def as_json(self) -> dict[str, Any]:
        """It as JSON; what is not a number becomes None."""
        control = None if self.control is None else _or_none(self.control)
        return {
            "key": self.key, "sentence": self.sentence, "tone": self.tone, "section": self.section,
            "steps": self.steps, "values": _or_none(self.values), "control": control,
        }  # fmt: skip


def _or_none(values: Sequence[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]


def scalar(snapshot: Snapshot | None, name: str, group: Group = "bias") -> float:
    """A scalar of a snapshot; NaN where it has none."""
    return nan if snapshot is None else finite_or_nan((snapshot.summary.get(group) or {}).get(name))


def array_of(snapshot: Snapshot | None, name: str, group: Group = "bias") -> np.ndarray | None:
    """An array of a snapshot on one probe; None where it has none."""
    return None if snapshot is None else snapshot.arrays.get(_PREFIXES[group] + name)


def is_measured(history: RunHistory, name: str, group: Group = "bias") -> bool:
    """Whether the newest snapshot has such a scalar, even one that is no number."""
    newest = history.last or history.first
    return newest is not None and name in (newest.summary.get(group) or {})


def over_training(
    history: RunHistory, name: str, control: str, group: Group = "bias"
) -> tuple[list[int], list[float], list[float] | None]:
    """Steps, values and controls of the snapshots whose step is known."""
    steps = [snapshot.step for snapshot in history.dated]
    values = [scalar(snapshot, name, group) for snapshot in history.dated]
    controls = [scalar(snapshot, control, group) for snapshot in history.dated]
    return steps, values, controls if any(map(isfinite, controls)) else None


def over_training_beside_level(
    history: RunHistory, name: str, group: Group
) -> tuple[list[int], list[float], list[float] | None]:
    """The same of a quantity whose control is a level."""
    steps, values, _ = over_training(history, name, name, group)
    levels = [MEASURED[name].level(snapshot.summary, group) for snapshot in history.dated]
    return steps, values, levels if any(map(isfinite, levels)) else None


def at_step(snapshot: Snapshot) -> str:
    """When a snapshot was taken, in words."""
    return f"at step {snapshot.step:,}" if snapshot.step >= 0 else "in this snapshot"
