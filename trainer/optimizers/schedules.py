"""Schedules: one class per ``optim.schedule``, with the fields of ``optim`` that it reads beside the warm-up's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from typing_extensions import override

RowT = TypeVar("RowT")
NameT = TypeVar("NameT", bound=str)


def fields_of(kind: type[Any]) -> set[str]:
    """Return the fields of ``optim`` that a row reads besides those that all rows read."""
    return {field.name for field in dataclasses.fields(kind)}


def read_row(table: Mapping[NameT, type[RowT]], name: NameT, values: Mapping[str, Any]) -> RowT:
    """Build the row of this name from the values of ``optim``'s fields that it reads."""
    kind = table[name]
    return kind(**{field: values[field] for field in fields_of(kind)})


def unread_names(table: Mapping[Any, type[Any]], name: str) -> set[str]:
    """Return the fields of ``optim`` that other rows of ``table`` read, and this one does not."""
    return set().union(*map(fields_of, table.values())) - fields_of(table[name])


def unread_fields(
    what: str, table: Mapping[Any, type[Any]], name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Write a line for every value of ``optim`` that was set although the chosen row does not read it.

    Args:
        what: kind of the rows, as in ``optimizer``.
        table: the rows by name.
        name: name of the chosen row.
        values: values of ``optim``'s fields.
        defaults: defaults of the same fields.
    """
    return [
        f"optim.{field} is {values[field]}, which {what} {name} does not read: remove it (default: {defaults[field]})"
        for field in sorted(unread_names(table, name))
        if values[field] != defaults[field]
    ]


# ---------------------------------------------------------------- schedules

ScheduleName = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate after the warm-up; the base of the rows of :data:`SCHEDULES`."""

    def share(self, warmup: int, max_steps: int, step: int) -> float:
        """Return the share of the peak at ``step`` (from 0) of a run of ``max_steps``, of which ``warmup`` were the
        warm-up.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Cosine(Schedule):
    """Schedule of half a cosine down to the floor."""

    min_lr_ratio: float

    @override
    def share(self, warmup: int, max_steps: int, step: int) -> float:
        progress = (step - warmup) / max(1, max_steps - 1 - warmup)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class WSD(Schedule):
    """Schedule warm-up, stable, decay: the peak, then a straight line to the floor at the end."""

    min_lr_ratio: float
    decay_ratio: float

    @override
    def share(self, warmup: int, max_steps: int, step: int) -> float:
        # A share of the run. The step after the warm-up is at the peak also where the run is too short for both.
        n_decay = min(self.decay_ratio * max_steps, max_steps - 1 - warmup)
        left = max_steps - 1 - step
        into_decay = max(0.0, 1 - left / n_decay) if n_decay > 0 else 0.0
        return 1 - (1 - self.min_lr_ratio) * into_decay


@dataclass(frozen=True)
class Constant(Schedule):
    """Schedule that stays at the peak."""

    @override
    def share(self, warmup: int, max_steps: int, step: int) -> float:
        return 1.0


#: Schedules by ``optim.schedule``.
SCHEDULES: dict[ScheduleName, type[Schedule]] = {"cosine": Cosine, "wsd": WSD, "constant": Constant}
