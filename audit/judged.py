"""A checkpoint of a suite, and what was found of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .places import Place
from .suite import Content, Member

Kind = Literal[
    "damaged", "values", "tensors", "config", "tokenizer", "duplicate", "mixed", "stranger", "order", "continued"
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a checkpoint."""

    kind: Kind
    what: str
    """In a sentence, with its evidence."""


@dataclass
class Judged:
    """A checkpoint and what was found of it."""

    member: Member
    name: str
    """Of the member, without the folder that all of a suite share."""
    content: Content | None = None
    """None where it could not be read."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and not wrong."""
    cosine_with_first: float = np.nan
    """With the first checkpoint of its birth: mean over tensors."""
    distance_from_previous: float = np.nan
    """From the checkpoint before it on the curve."""
    birth_unknown: bool = False
    """Whether no test can tell that it shares a birth with the largest group."""
    may_be_reversed: bool = False
    """Whether it fits a curve of which nothing tells the earlier end."""

    @property
    def label(self) -> str:
        """What sentences call it."""
        return self.name if self.member.place is None else self.member.place.words

    @property
    def verdict(self) -> str:
        """In a word or two: the kinds of what is wrong, ``right``, ``birth unknown`` or ``direction unknown``."""
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in self.findings))
        unknown = "birth unknown" if self.birth_unknown else "direction unknown" if self.may_be_reversed else ""
        return kinds or unknown or "right"

    @property
    def is_open(self) -> bool:
        """Whether nothing is wrong with it, and something of it cannot be told."""
        return not self.findings and (self.birth_unknown or self.may_be_reversed)

    def has(self, kind: Kind) -> bool:
        """Whether something of this kind was found."""
        return any(finding.kind == kind for finding in self.findings)

    def found(self, kind: Kind, what: str) -> None:
        """Something is wrong."""
        self.findings.append(Finding(kind, what))


@dataclass
class Same:
    """Checkpoints whose sampled weights are alike, mostly one alone."""

    members: list[Judged]
    values: dict[str, np.ndarray]
    """Of them."""
    place: Place | None
    """That they are of; where several claim one, the one that fits the curve, or the least."""
    right: list[Place] = field(default_factory=list)
    """Claims that may be right, where several contradict one another."""
    mixed: set[str] = field(default_factory=set)
    """Tensors that are another checkpoint's."""
    is_mean: bool = False
    """True for a mean of other checkpoints, which no training passed through."""
    is_copy: bool = False
    """True if all of its tensors are."""

    @property
    def own_values(self) -> dict[str, np.ndarray]:
        """The values of the tensors that are no other checkpoint's."""
        return {name: values for name, values in self.values.items() if name not in self.mixed}

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        """Sampled values of gains and biases (`Sampled.vectors`)."""
        return {} if self.members[0].content is None else self.members[0].content.sampled.vectors

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the sampled bytes of each tensor (`Sampled.digests`)."""
        return {} if self.members[0].content is None else self.members[0].content.sampled.digests

    @property
    def spreads(self) -> dict[str, float]:
        """Of their vectors (`Sampled.spreads`)."""
        content = self.members[0].content
        return {} if content is None else content.sampled.spreads

    @property
    def is_drawn(self) -> bool:
        """Whether one of them is a birth that was drawn again, so that nobody can have exchanged it."""
        return any(one.member.drawn_from is not None for one in self.members)

    @property
    def claims(self) -> list[Place]:
        """Places that their names say, in their order."""
        return sorted({one.member.place for one in self.members if one.member.place is not None})

    @property
    def label(self) -> str:
        """What sentences call them."""
        return next((one.label for one in self.members if one.member.place == self.place), self.members[0].label)


def listed(judged: Sequence[Judged]) -> str:
    """Some checkpoints in a few words."""
    return in_few_words([one.label for one in judged])


def in_few_words(names: Sequence[str]) -> str:
    """Up to four names, or the first two and the last of more with their number."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"
