"""Configs on disk: writing of a whole config, and differences from the config that a run was made with."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..files import read_text, write_text
from ..measure.records import RunDir
from ..models.config import dotted
from ..models.user_classes import name_user_code, note_code_of_run
from ..yaml_files import MOST_BYTES, read_yaml, yaml_text
from .config import RunConfig
from .optimizers.schedules import SCHEDULES, unread_names

#: Fields whose ``auto`` a run replaces by its own choice when it begins (``numerics.py``).
DECIDED = ("trainer.precision", "trainer.gather")

_SEAL = "# sha256 of the lines above: "
_MEND = "restore it from a copy; to go on with other values leave it and give them as options, --FIELD VALUE"


def write_config(config: RunConfig, file: Path) -> None:
    """Write every field of ``config`` as YAML, which `read_config` reads, and in the last line their checksum."""
    text = yaml_text(asdict(config))
    write_text(file, f"{text}{_SEAL}{_seal_of(text)}")


def is_sealed(file: Path) -> bool:
    """Return True if a run wrote this file, whole, and nobody has changed it since."""
    text, seal, sha256 = read_text(file, MOST_BYTES).rpartition(_SEAL)
    return bool(seal) and _seal_of(text) == sha256


def _seal_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() + "\n"


def read_config_yaml(file: Path) -> Any:
    """Read a config's file; RunError if it is a run's own and was changed or cut off.

    In a run's own file, values that its schedule does not read are dropped: earlier versions kept them.
    """
    check_saved_config(file)
    tree = read_yaml(file)
    (note_code_of_run if _in_run(file) else name_user_code)(tree)
    optim = tree.get("optim") if isinstance(tree, dict) else None
    if _in_run(file) and isinstance(optim, dict) and (name := str(optim.get("schedule"))) in SCHEDULES:
        tree["optim"] = {field: optim[field] for field in optim if field not in unread_names(SCHEDULES, name)}
    return tree


def _in_run(file: Path) -> bool:
    """Return True if this is the ``config.yaml`` in a run's folder."""
    run = RunDir(file.parent)
    return file.name == run.config.name and RunDir.is_run(run.path)


def check_saved_config(file: Path) -> None:
    """Refuse the ``config.yaml`` in a run's folder if the run did not write it so; other files are accepted.

    A file that was cut off reads as a config all the same, whose last fields have their defaults. Runs of versions
    before this check have no checksum; their file must have its last group of fields.

    Raises:
        RunError: the file was changed or cut off; the message names the remedy.
    """
    if not _in_run(file):
        return
    run = RunDir(file.parent)
    text, seal, sha256 = read_text(file, MOST_BYTES).rpartition(_SEAL)
    if seal and sha256 != _seal_of(text):
        raise RunError(f"{file}: changed since the run wrote it (its last line has the checksum); {_MEND}")
    last = list(asdict(RunConfig()))[-1]
    if not seal and (run.read_birth().get("config_is_sealed") or f"\n{last}:" not in sha256):
        raise RunError(f"{file}: cut off (its last line, a checksum, is missing); {_MEND}")


def read_saved_fields(run: RunDir) -> dict[str, Any]:
    """Read every field of a run's ``config.yaml`` by dotted name; RunError if it was changed or cut off."""
    fields = read_config_yaml(run.config)
    if not isinstance(fields, dict):
        raise RunError(f"{run.config}: damaged (no fields in it); {_MEND}")
    # A field that came after the run was made has its default in it.
    return dotted(asdict(RunConfig())) | dotted(fields)


def config_differences(config: RunConfig, run: RunDir) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which ``config`` differs from the run's own, by dotted name and sorted: (the run's value,
    ``config``'s).
    """
    had, now = read_saved_fields(run), dotted(asdict(config))
    name = "model.vocab_size"
    if had.get(name) != now[name] and run.read_birth().get("vocab_size_asked") == now[name]:
        now[name] = had[name]  # as much was asked for when the run began, and its corpus gave fewer tokens
    # A run keeps the choices of its beginning.
    now |= {name: had[name] for name in had.keys() & now.keys() if now[name] == "auto" and name in DECIDED}
    values = {name: (had.get(name), now.get(name)) for name in sorted({*had, *now})}
    return {name: (there, here) for name, (there, here) in values.items() if there != here}
