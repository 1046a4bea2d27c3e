"""What a case is: a command, what is damaged before it, and what it must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: ``refuse``: status 0 is a fault. ``same``: refused, or what the undamaged input gives. ``any``: refused or accepted.
Must = Literal["refuse", "same", "any"]


@dataclass(frozen=True)
class Case:
    """One input."""

    about: str
    """What is done to it, for a person."""
    parts: tuple[str, ...]
    """Of the example, what it needs."""
    prepare: Callable[[Path], Must]
    """Damages the copy in a folder; what must come of it."""
    arguments: tuple[str, ...]
    """The command."""
    names: tuple[str, ...]
    """Words of which a refusal must have one."""
