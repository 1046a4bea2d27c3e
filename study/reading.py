"""Study files: reading of their YAML and checks of its fields, for any kind."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..schema import shown
from ..trainer.by_name.shipped_configs import shipped_config
from ..yaml_files import read_yaml

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
        raise UsageError(f"{file}: the file is {shown(content)}; write fields as `name: value`")
    return content


class Reader:
    """Checker of the values of one study file; a fault is a UsageError that names file, field and value."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def wrong(self, field: str, value: Any, mend: str) -> UsageError:
        """Make the error to raise."""
        return UsageError(f"{self.file}: {field} is {shown(value)}: {mend}")

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
