"""Request of a call of `birthmark ablate`: study, scale and folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import write_text
from ..yaml_files import yaml_text
from .reading import read_fields

#: File in a study's folder: the changes by ``--set`` when its runs were made, by dotted field.
_OVERRIDES = "overrides.yaml"


@dataclass(frozen=True)
class StudyRequest:
    """Request to `birthmark ablate`."""

    file: Path
    """The study file."""
    scale: str | None = None
    """Scale, one of the file's; None: the file's own base."""
    out: Path | None = None
    """The study's folder; None: ``studies/NAME``."""
    arms: tuple[str, ...] | None = None
    """Arms to run; None: all."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted fields that replace those of the base; what the file says of an arm or a continuation wins over them."""
    jobs: int = 1
    """Runs at a time."""
    summary: bool = False
    """Run nothing, and summarise what there is."""
    trial: str | None = None
    """Trial to run, by its name (``ARM/seed-N``) or its index from 0; None: all."""
    retries: int = 1
    """Number of restarts of a failed trial."""

    def refuse_arms(self, kind: str) -> None:
        """Raise UsageError if arms are chosen, for a kind of study without arms."""
        if self.arms is not None:
            raise UsageError(f"--arms {','.join(self.arms)}: a study of {kind} has none; leave it out")

    def folder(self, name: str) -> Path:
        """Return the folder of a study of this name."""
        return self.out or Path("studies") / name

    def keep_overrides(self, out: Path) -> None:
        """Write the overrides of the runs into the study's folder ``out``."""
        write_text(out / _OVERRIDES, yaml_text(dict(self.overrides)))

    def overrides_in(self, out: Path) -> dict[str, Any]:
        """Return the overrides of the base; for a summary, those of the runs in ``out``, then its own.

        Raises:
            UsageError: the file with these overrides is damaged.
        """
        file = out / _OVERRIDES
        kept = read_fields(file) if self.summary and file.is_file() else {}
        return {**kept, **self.overrides}
