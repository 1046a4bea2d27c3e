"""One call of `birthmark ablate`: which study, at which scale, into which folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import write_text
from ..yaml_files import yaml_text
from .reading import read_fields

#: In a study's folder: what ``--set`` changed when its runs were made, by dotted field.
_OVERRIDES = "overrides.yaml"


@dataclass(frozen=True)
class StudyRequest:
    """What `birthmark ablate` runs."""

    file: Path
    """The study file."""
    scale: str | None = None
    """One of the file's scales; None: as the file stands."""
    out: Path | None = None
    """The study's folder; None: ``studies/NAME``."""
    arms: tuple[str, ...] | None = None
    """These arms alone; None: all."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted fields that replace those of the base; what the file says of an arm or a continuation wins over them."""
    jobs: int = 1
    """Runs at a time."""
    summary: bool = False
    """Run nothing, and summarise what there is."""
    trial: str | None = None
    """This trial alone, by its name (``ARM/seed-N``) or its place from 0; None: all."""
    retries: int = 1
    """How often a trial that failed is started again."""

    def refuse_arms(self, kind: str) -> None:
        """UsageError where arms are chosen, of a study of a kind that has none."""
        if self.arms is not None:
            raise UsageError(f"--arms {','.join(self.arms)}: a study of {kind} has none; leave it out")

    def folder(self, name: str) -> Path:
        """The folder of a study of this name."""
        return self.out or Path("studies") / name

    def keep_overrides(self, out: Path) -> None:
        """Write into the study's folder ``out`` what its runs are made with."""
        write_text(out / _OVERRIDES, yaml_text(dict(self.overrides)))

    def overrides_in(self, out: Path) -> dict[str, Any]:
        """What to change in the base: of a summary, all that was changed for the runs in ``out``, then its own.

        Raises:
            UsageError: the file that says so is damaged.
        """
        file = out / _OVERRIDES
        kept = read_fields(file) if self.summary and file.is_file() else {}
        return {**kept, **self.overrides}
