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
from .run_history import RunHistory


def enumerated(parts: Sequence[str]) -> str:
    """Join parts of a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


# ---------------------------------------------------------------- verdict
# Verdicts on a run, and functions by which questions read its numbers.

Tone = Literal["present", "weak", "absent", "unclear"]
"""Presence of an effect. ``weak`` is a trace, beyond chance; ``unclear`` means that the numbers cannot tell."""

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
    """A sentence about a run, with the numbers behind it."""

    key: str
    """Name of the question, unique."""
    sentence: str
    tone: Tone
    """Presence of the effect."""
    steps: list[int]
    """Steps of ``values``."""
    values: list[float]
    """Values over training that it judges; NaN where a step has no number."""
    control: list[float] | None
    """Controls of the values at the same steps; None without a control."""
    section: str
    """Section of the page that shows it in full; "" for none."""
    headline: bool = True
    """True if it belongs on the first screen; other verdicts introduce their section."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON; values that are not numbers become None."""
        control = None if self.control is None else _or_none(self.control)
        return {
            "key": self.key, "sentence": self.sentence, "tone": self.tone, "section": self.section,
            "steps": self.steps, "values": _or_none(self.values), "control": control,
        }  # fmt: skip


def _or_none(values: Sequence[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]


def scalar(snapshot: Snapshot | None, name: str, group: Group = "bias") -> float:
    """Return a scalar of a snapshot; NaN if it has none."""
    return nan if snapshot is None else finite_or_nan((snapshot.summary.get(group) or {}).get(name))


def array_of(snapshot: Snapshot | None, name: str, group: Group = "bias") -> np.ndarray | None:
    """Return an array of a snapshot on one probe; None if it has none."""
    return None if snapshot is None else snapshot.arrays.get(_PREFIXES[group] + name)


def is_measured(history: RunHistory, name: str, group: Group = "bias") -> bool:
    """Return True if the newest snapshot has such a scalar, even one that is not a number."""
    newest = history.last or history.first
    return newest is not None and name in (newest.summary.get(group) or {})


def over_training(
    history: RunHistory, name: str, control: str, group: Group = "bias"
) -> tuple[list[int], list[float], list[float] | None]:
    """Return steps, values and controls of the snapshots whose step is known."""
    steps = [snapshot.step for snapshot in history.dated]
    values = [scalar(snapshot, name, group) for snapshot in history.dated]
    controls = [scalar(snapshot, control, group) for snapshot in history.dated]
    return steps, values, controls if any(map(isfinite, controls)) else None


def over_training_beside_level(
    history: RunHistory, name: str, group: Group
) -> tuple[list[int], list[float], list[float] | None]:
    """Return steps, values and controls of a quantity whose control is a level."""
    steps, values, _ = over_training(history, name, name, group)
    levels = [MEASURED[name].level(snapshot.summary, group) for snapshot in history.dated]
    return steps, values, levels if any(map(isfinite, levels)) else None


def at_step(snapshot: Snapshot) -> str:
    """Say when a snapshot was taken."""
    return f"at step {snapshot.step:,}" if snapshot.step >= 0 else "in this snapshot"
