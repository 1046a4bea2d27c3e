"""Model that training began with, and words for it: a birth, a pretrained model, or an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any


@dataclass(frozen=True)
class Start:
    """Words for the model of step 0."""

    is_birth: bool
    """True if a seed drew it."""
    noun: str
    """The model itself."""
    label: str
    """Label in a word, for tables."""
    at: str
    """Words for the time of its measurement."""
    whose: str
    """Name the owner of the direction that the model began with."""

    def says(self, text: str) -> str:
        """Adapt ``text``, written for a birth, to this start."""
        if self.is_birth:
            return text
        return reduce(lambda found, pair: re.sub(pair[0], pair[1], found), _OF_NO_BIRTH, text)


#: Words of births, and those of a start that is none. The longer phrase comes first.
_OF_NO_BIRTH = (
    (r"\bbirths of the same config from other seeds\b", "models that other seeds draw from its config"),
    (r"\bthe newborn model\b", "the starting model"),
    (r"\bThe seed direction\b", "The starting direction"),
    (r"\bseed direction\b", "starting direction"),
    (r"\bSeed direction\b", "Starting direction"),
    (r"\bseed directions of other seeds\b", "directions of strangers"),
    (r"\bbirth's\b", "the start's"),
    (r"\b[Ii]ts own birth\b", "its own start"),
    (r"\bown birth\b", "own start"),
    (r"\bother births\b", "strangers"),
    (r"\bAt birth\b", "At the start"),
    (r"\b(?<!the )birth\b", "the start"),
)

BIRTH = Start(True, "birth", "birth", "at birth", "The seed's")
PRETRAINED = Start(False, "the model it started from", "start", "at the start", "The starting model's")
UNKNOWN = Start(False, "the start", "start", "at the start", "The starting model's")


def start_of(birth: Mapping[str, Any]) -> Start:
    """Return the start of a training from its certificate, which is empty if there is none."""
    return PRETRAINED if birth.get("init_from") else BIRTH if birth else UNKNOWN


def start_of_all(starts: Iterable[Start]) -> Start:
    """Return the words for several trainings together: those of a birth if one of them began with one."""
    found = list(starts)
    return next((start for start in found if start.is_birth), found[0] if found else BIRTH)
