"""What a case is: a command, what is damaged before it, and what it must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: ``refuse``: status 0 is a fault. ``same``: refused, or what the undamaged input gives. ``any``: refused or accepted.
#: ``well``: what the undamaged input gives, and no refusal.
Must = Literal["refuse", "same", "any", "well"]


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
    around: Callable[[], None] = lambda: None
    """Called in the command's process, in its folder, before the command: limits, clocks, rights."""
    then: Callable[[Path], tuple[str, ...]] | None = None
    """A second command, of the folder as the first has left it, without what is around: it must end well."""
    check: Callable[[Path], list[str]] = lambda folder: []
    """Faults of the folder as the commands have left it."""
    fresh: bool = False
    """Run in a new Python, which imports everything in the case's folder."""
