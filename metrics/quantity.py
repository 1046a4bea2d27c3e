"""Declaration of a quantity of a snapshot: its name, dimensions, label, unit, format, control, section and definition.

One declaration drives ``summary.json``, ``arrays.safetensors``, ``metrics.jsonl``, W&B, tables, pages, CSV files and
docs/quantities.md. Built-in ones are in :mod:`.quantities`; a user's metric brings its own. Nothing here loads
torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

AxisName = Literal[
    "layer",
    "state",
    "head",
    "position",
    "channel",
    "unit",
    "expert",
    "token",
    "epsilon",
    "rank",
    "direction",
    "stranger",
    "index",
]
Reduction = Literal["", "mean", "max", "median", "first", "last", "last_mean"]
ScalarReduction = Literal["", "mean", "max", "sum", "last"]
ScaleName = Literal["linear", "log"]


@dataclass(frozen=True)
class Axis:
    """A dimension of an array."""

    letter: str
    """Letter for its length in shapes."""
    column: str
    """Name of its column in CSV files."""
    first: int
    """The coordinate of index 0."""
    meaning: str
    """Meaning of its indices."""


AXES: Mapping[AxisName, Axis] = {
    "layer": Axis("L", "layer", 1, "blocks, from 1"),
    "state": Axis("L+1", "layer", 0, "the residual stream: 0 is the embedding output, the others are after each block"),
    "head": Axis("H", "head", 0, "query heads, from 0"),
    "position": Axis("T", "position", 0, "positions of a probe sequence, from 0"),
    "channel": Axis("d", "channel", 0, "channels of the residual stream, from 0"),
    "unit": Axis("F", "unit", 0, "hidden units of the MLP, from 0"),
    "expert": Axis("X", "expert", 0, "experts of a mixture, from 0"),
    "token": Axis("V", "token", 0, "token ids, from 0"),
    "epsilon": Axis("E", "epsilon", 0, "values of ε, as `sink_epsilons` lists them"),
    "rank": Axis("K", "rank", 1, "entries of a ranked list, from 1 (10, or fewer where there are fewer)"),
    "direction": Axis("d", "rank", 1, "directions of the residual stream, from 1 for the strongest"),
    "stranger": Axis("S", "stranger", 0, "births of the same config from other seeds, from 0"),
    "index": Axis("N", "index", 0, "entries of a list of any length, from 0"),
}
"""Dimensions that an array may have."""

#: Columns of CSV files of numbers, in their order → their meaning. A file has only those that its numbers need.
CSV_COLUMNS: Mapping[str, str] = {
    "run": "the run's name as the page has it; of `intervene`, `length` and `compare` the model's name",
    "other": "of `compare`, the model that it is compared with",
    "probe": "`random`, `text`, `bos` or `text_without_bos` (definitions §2)",
    "step": "optimizer steps",
    "lambda": "dose of an intervention, 1 where its kind has none; empty of the model left alone",
    "bits": "of `quantise`: bits of weights and of activations, such as w4a16",
    "alpha": "place on the straight line between two models' weights, 0 is `run`, 1 is `other`",
    "evicted": "first keys that are gone from the cache (`length`)",
    "layer": "block from 1; 0 is the embedding output",
    "other_layer": "the same, of `other`",
    "head": "query head, from 0",
    "position": "position of a probe sequence, from 0",
    "epsilon": "importance above which a key is a sink",
    "rank": "place in a ranked list, from 1",
    "unit": "hidden unit of the MLP, from 0",
    "expert": "expert of a mixture, from 0",
    "channel": "channel of the residual stream, from 0",
    "token": "token id",
    "text": "the token's text, control characters written out",
    "stranger": "birth of the same config from another seed, from 0",
    "index": "entry of a list of any length, from 0",
    "quantity": "what the number is: its name in the tables above",
    "value": "the number; empty where there is none",
}

#: An array ``[blocks, …]`` to one number for each block.
REDUCTIONS: Mapping[Reduction, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda a: a,
    "mean": lambda a: a.reshape(len(a), -1).mean(1),
    "max": lambda a: a.reshape(len(a), -1).max(1),
    "median": lambda a: np.median(a.reshape(len(a), -1), axis=1),
    "first": lambda a: a.reshape(len(a), -1)[:, 0],
    "last": lambda a: a.reshape(len(a), -1)[:, -1],
    "last_mean": lambda a: a[..., -1].reshape(len(a), -1).mean(1),
}


def _known(a: np.ndarray) -> np.ndarray:
    """Drop NaN entries, unless all are NaN: blocks that do not show a place have NaN."""
    is_nan = np.isnan(a)
    return a[~is_nan] if 0 < is_nan.sum() < a.size else a


#: An array to the scalar of the same name.
SCALARS: Mapping[ScalarReduction, Callable[[np.ndarray], float]] = {
    "mean": lambda a: float(_known(a).mean()),
    "max": lambda a: float(_known(a).max()),
    "sum": lambda a: float(_known(a).sum()),
    "last": lambda a: float(np.asarray(a[-1]).mean()),
}

#: Levels that follow from the measurement, as controls: functions from summary.json to the level.
LEVELS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "seq_len": lambda summary: float((summary.get("probe") or {}).get("seq_len") or np.nan),
    "1/d_model": lambda summary: 1 / float((summary.get("model") or {}).get("d_model") or np.nan),
    "1/sqrt(d_head)": lambda summary: _head_width(summary) ** -0.5,
}


def _head_width(summary: Mapping[str, Any]) -> float:
    """Return the channels of a head; NaN if the snapshot does not say."""
    model = summary.get("model") or {}
    latent = (model.get("attention") or {}).get("latent") or {}
    width = model.get("d_head") or model.get("head_dim")
    if width is None and model.get("d_model") and model.get("n_heads"):
        width = model["d_model"] // model["n_heads"]
    if width and latent.get("kv_rank"):
        turning, still = latent.get("rope_width"), latent.get("nope_width")
        width = (width // 2 if turning is None else turning) + (width if still is None else still)
    return float(width) if width else float("nan")


@dataclass(frozen=True)
class Sizes:
    """Sizes that a metric is made for: a model's shape, and the length of the probe's sequences."""

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_ff: int
    vocab_size: int
    seq_len: int
    d_value: int | None = None
    """Channels of a head's values and outputs, where they are not ``d_head``."""
    n_experts: int = 0
    """Experts of a block, where there are any."""
    d_expert: int = 0
    """Hidden units of an expert."""

    def of(self, axis: AxisName) -> int | None:
        """Return the length of a dimension; None if the metric decides it."""
        lengths: dict[AxisName, int] = {
            "layer": self.n_layers,
            "state": self.n_layers + 1,
            "head": self.n_heads,
            "position": self.seq_len,
            "channel": self.d_model,
            "direction": self.d_model,
            "unit": self.d_ff,
            "expert": self.n_experts,
            "token": self.vocab_size,
        }
        return lengths.get(axis)


@dataclass(frozen=True)
class Column:
    """Settings for a quantity's column in a table."""

    heading: str = ""
    """Heading, by default the quantity's label; a line break where a narrow heading has one."""
    place: int = 100
    """Order from the left; columns of equal place keep the order of their declarations."""
    gives_way: int = 1
    """Order in which columns give way where a terminal is narrow, from 1; 0: never."""
    page_only: bool = False
    """The terminal never shows it."""
    text_heading: str = ""
    """Heading of a second column, of the text probe, where that was measured; "": none."""
    key: str = ""
    """Name in ``--json``; default: the quantity's."""


@dataclass(frozen=True)
class Quantity:
    """A quantity that a metric gives: a scalar, an array, or an array with a scalar of the same name."""

    name: str
    """Key in ``summary.json`` and ``arrays.safetensors``, ``bias/NAME`` in ``metrics.jsonl`` and W&B, ``quantity`` in
    CSV files."""
    axes: tuple[AxisName, ...] = ()
    """Dimensions of its array, outermost first (`AXES`); () for a mere scalar."""
    label: str = ""
    """Name on axes and in tables; default: its name with spaces."""
    definition: str = ""
    """Definition in one plain sentence, as docs/quantities.md has it."""
    unit: str = ""
    """Unit; "" for a plain number."""
    format: str = ".3f"
    """Format in tables: a format specification, ``percent`` or ``ratio``."""
    section: str = ""
    """The link of the causal chain that it belongs to (`quantities.SECTIONS`), or a section of the user's own."""
    symbol: str = ""
    """Word or symbol for it in little room."""
    scale: ScaleName = "linear"
    """Scale on which pictures draw it."""
    scalar: ScalarReduction = ""
    """Reduction of the array to the scalar of the same name; "" without such a scalar."""
    of: str = ""
    """The array that a scalar alone is made of, where there is one."""
    per_block: Reduction = ""
    """Reduction to one number per block of an array with more dimensions than blocks (its own, or the one of `of`)."""
    control: str | float | None = None
    """Level for comparison: the name of a quantity, a level of `LEVELS`, or a number."""
    control_label: str = ""
    """Name of the control in words."""
    when: str = ""
    """The condition under which it is measured; "" where it always is."""
    over_training: Column | None = Column()
    """Column in the table of snapshots, if it has a scalar; None: not shown."""
    by_block: Column | None = Column()
    """Column in the table of blocks, if its array has blocks; None: not shown."""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))
        # JSON has no tuples.
        object.__setattr__(self, "axes", tuple(self.axes))

    @property
    def has_array(self) -> bool:
        """True if ``arrays.safetensors`` holds it."""
        return bool(self.axes)

    @property
    def has_scalar(self) -> bool:
        """True if ``summary.json`` and ``metrics.jsonl`` hold it."""
        return not self.axes or bool(self.scalar)

    @property
    def array(self) -> str:
        """Name of the array that blocks are read from; "" without one."""
        return self.name if self.axes else self.of

    @property
    def shape(self) -> str:
        """Shape of the array in letters, as in the docs: ``[L, H]``."""
        return f"[{', '.join(AXES[axis].letter for axis in self.axes)}]"

    @property
    def axis_label(self) -> str:
        """Label and unit for an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def heading(self, column: Column | None) -> str:
        """Return the column's heading, or the label without one."""
        return (column.heading if column else "") or self.label

    def blocks(self, array: np.ndarray) -> np.ndarray:
        """Reduce its array ``[blocks, …]`` to one number for each block (or each state of the residual stream)."""
        return REDUCTIONS[self.per_block](array)

    def reduced(self, array: np.ndarray) -> float:
        """Reduce its array to its scalar."""
        return SCALARS[self.scalar](array)

    def level(self, summary: Mapping[str, Any], group: str = "bias") -> float:
        """Return the control's value in a snapshot; NaN without one.

        Args:
            summary: summary of the snapshot.
            group: ``bias``, or ``bias_text`` for the text probe.
        """
        if self.control is None or isinstance(self.control, (int, float)):
            return float("nan" if self.control is None else self.control)
        if self.control in LEVELS:
            # A probe that was given may have a length of its own (``probe_text``).
            probe = summary.get("probe" + group.removeprefix("bias")) or summary.get("probe")
            return LEVELS[self.control]({**summary, "probe": probe})
        value = (summary.get(group) or {}).get(self.control)
        return float("nan") if value is None else float(value)

    def problems(self) -> list[str]:
        """List everything that makes this declaration impossible, one line each, with the remedy."""
        found = []
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            found.append(f"name {self.name!r}: give lower-case letters, digits and underscores")
        for axis in self.axes:
            if axis not in AXES:
                found.append(f"{self.name}: axis {axis!r}: give one of {', '.join(AXES)}")
        choices = (("scalar", ScalarReduction), ("per_block", Reduction), ("scale", ScaleName))
        for field, choice in choices:
            if (value := getattr(self, field)) not in get_args(choice):
                found.append(f"{self.name}: {field} {value!r}: give one of {', '.join(filter(None, get_args(choice)))}")
        if self.scalar and not self.axes:
            found.append(f"{self.name}: scalar {self.scalar!r} is made of an array: give axes, or leave it out")
        if self.format not in ("percent", "ratio"):
            try:
                format(1 if self.format.endswith("d") else 1.0, self.format)
            except ValueError:
                found.append(f"{self.name}: format {self.format!r}: give a format specification, percent or ratio")
        if not self.definition:
            found.append(f"{self.name}: give a definition, one sentence")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the declaration for JSON, without fields at their defaults."""
        plain = Quantity(self.name)
        every = asdict(self)
        return {
            field.name: every[field.name]
            for field in fields(self)
            if field.name == "name" or getattr(self, field.name) != getattr(plain, field.name)
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Quantity:
        """Read a declaration that :meth:`to_json` wrote; fields of later versions are ignored.

        Raises:
            ValueError: ``value`` is not a declaration.
        """
        known = {field.name for field in fields(cls)}
        try:
            given = {key: entry for key, entry in value.items() if key in known}
            columns = {field.name for field in fields(Column)}
            for table in ("over_training", "by_block"):
                if isinstance(given.get(table), Mapping):
                    given[table] = Column(**{k: v for k, v in given[table].items() if k in columns})
            found = cls(**given)
            problems = found.problems()
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{value!r} declares no quantity ({error})") from None
        if problems:
            raise ValueError("; ".join(problems))
        return found


# ---------------------------------------------------------------- quantities that no table lists
# A quantity that appears in no table unless it asks to, and the conditions that declarations name for a quantity.

unlisted = partial(Quantity, over_training=None, by_block=None)
"""A quantity that stands in no table."""

BIRTH_KNOWN = "the model's birth is known"
STRANGERS_MEASURED = "births of other seeds are measured"
ROWS_NOT_ONE = "rows of weights need not sum to 1"
