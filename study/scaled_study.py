"""Study files that may describe the same study again at other sizes, as ``scales``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ..errors import UsageError
from .reading import Reader, read_fields


@dataclass(frozen=True, kw_only=True)
class ScaledStudy:
    """A study that is checked, with its paths resolved."""

    file: Path
    name: str
    base: Path
    """Run config of all births."""
    init_seeds: tuple[int, ...]
    """Seeds of the runs."""
    scales: Mapping[str, Self] = dataclasses.field(default_factory=dict)
    """The same at other sizes."""

    def at(self, scale: str | None) -> Self:
        """Return the study at one of its scales; UsageError if the file has none of that name."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise UsageError(f"--scale {scale}: {self.file} has {', '.join(self.scales) or 'none'}")
        return self.scales[scale]


StudyT = TypeVar("StudyT", bound=ScaledStudy)

#: From the reader, the study's name, its fields, and where those stand that are not at the file's top, to the study.
AtOneScale = Callable[[Reader, str, Mapping[str, Any], Mapping[str, str]], StudyT]


def read_scaled_study(file: Path, fields: Sequence[str], at_one_scale: AtOneScale[StudyT]) -> StudyT:
    """Read a study file; UsageError names the file and the field.

    Args:
        file: YAML.
        fields: fields that a scale may replace; the file has these, and ``kind``, ``name``, and ``scales``.
        at_one_scale: function that reads and checks them.
    """
    content, reader = read_fields(file), Reader(file)
    reader.known(content, ("kind", "name", *fields, "scales"), "")
    name = content.get("name", file.stem)
    reader.name(name, "name")
    scales = {}
    for scale, given in reader.named(content.get("scales", {}), "scales").items():
        where = f"scales.{scale}."
        reader.known(reader.group(given, where.rstrip(".")), fields, where)
        scales[scale] = at_one_scale(reader, f"{name}-{scale}", content | given, dict.fromkeys(given, where))
    return dataclasses.replace(at_one_scale(reader, name, content, {}), scales=scales)
