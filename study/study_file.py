"""Study files: their YAML, their fields and scales, whatever their kind, and one request to run one."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ..errors import UsageError
from ..files import write_text
from ..schema import quoted
from ..trainer.by_name.shipped_configs import shipped_config
from ..trainer.config_file import text_problem
from ..yaml_files import read_yaml, yaml_text

_SCALAR = (str, int, float, bool, type(None))

#: An arm is a folder and a column of a table.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")

#: Fields of a run that the study itself sets.
SET_BY_STUDY = ("init_seed", "run_dir", "name")


def where(prefixes: Mapping[str, str], field: str) -> str:
    """Return the place of a field in the file; ``prefixes`` give those of fields that are not at its top."""
    return prefixes.get(field, "") + field


def read_fields(file: Path) -> dict[str, Any]:
    """Read the fields of a study file of any kind; UsageError names the file."""
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise UsageError(f"{file}: the file is {quoted(content, none='null')}; write fields as `name: value`")
    return content


class Reader:
    """Checker of the values of one study file; a fault is a UsageError that names file, field and value."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def wrong(self, field: str, value: Any, mend: str) -> UsageError:
        """Make the error to raise."""
        return UsageError(f"{self.file}: {field} is {quoted(value, none='null')}: {mend}")

    def known(self, fields: Mapping[str, Any], names: Sequence[str], prefix: str) -> None:
        """Refuse fields of other names; ``prefix`` is their group, with its dot."""
        for field in fields:
            if field not in names:
                close = difflib.get_close_matches(str(field), names, n=1)
                hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(names)}"
                raise UsageError(f"{self.file}: {prefix}{field}: no such field; {hint}")

    def group(self, value: Any, field: str) -> dict[str, Any]:
        """Return the fields of a group."""
        if not isinstance(value, dict):
            raise self.wrong(field, value, "write fields as `name: value` under it")
        return value

    def named(self, value: Any, field: str) -> dict[str, Any]:
        """Return a group whose names become folders or columns."""
        for name in self.group(value, field):
            self.name(name, f"a name in {field}")
        return value

    def name(self, value: Any, field: str) -> None:
        """Refuse a value that cannot name a folder."""
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.wrong(field, value, "give a name of letters, digits and _ . + - (in quotes if it is a number)")

    def path(self, value: Any, field: str) -> Path:
        """Return a config file, relative to the study, or a shipped one by its name."""
        if not isinstance(value, str) or not value:
            raise self.wrong(field, value, "give a run's config, relative to this file, or a shipped one's name")
        path = self.file.parent / value
        if path.is_file():
            return path
        if (shipped := shipped_config(value)) is None:
            raise self.wrong(field, value, f"no file {path}, nor a config that comes with the package")
        return shipped

    def seeds(self, value: Any, field: str) -> tuple[int, ...]:
        """Return seeds: at least one, all different."""
        whole = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
        if not whole or not value or len(set(value)) < len(value):
            raise self.wrong(field, value, "give a list of different whole numbers from 0")
        return tuple(value)

    def changes(self, value: Any, group: str) -> dict[str, dict[str, Any]]:
        """Return names, each with the dotted fields in which a run differs from the base."""
        found = self.named(value, group)
        for name, fields in found.items():
            for field, wanted in self.group(fields, f"{group}.{name}").items():
                where = f"{group}.{name}.{field}"
                if field in SET_BY_STUDY:
                    raise self.wrong(where, wanted, "the study sets it, leave it out")
                plain = all(isinstance(item, _SCALAR) for item in (wanted if isinstance(wanted, list) else [wanted]))
                if not isinstance(field, str) or not plain:
                    raise self.wrong(where, wanted, "write one dotted field and its value, as in model.d_model: 64")
        return found

    def families(self, value: Any, arms: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return groups of arms, by title."""
        families = self.group(value, "families")
        for family, members in families.items():
            if not isinstance(members, list) or not members:
                raise self.wrong(f"families.{family}", members, "give a list of arms")
            for member in members:
                if not isinstance(member, str) or member not in arms:
                    raise self.wrong(f"families.{family}", member, "no such arm")
        return families


# ---------------------------------------------------------------- a request to run a study

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
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
        """Return the folder of a study of this name.

        Raises:
            UsageError: no run can lie in it.
        """
        folder = self.out or Path("studies") / name
        if problem := text_problem(str(folder)):
            raise UsageError(f"--out {quoted(str(folder))}: {problem}")
        return folder

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


# ---------------------------------------------------------------- scaled study
# Study files that may describe the same study again at other sizes, as ``scales``.


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
