"""Config files that the package brings, found by name from any folder."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import UsageError
from ...measure.records import RunDir

Kind = Literal["run", "model", "study"]

_ROOT = Path(__file__).parents[2] / "configs"

#: Studies that came with the package once, and their files in the repository.
_MOVED = {"robustness": "research/robustness/study.yaml", "seeds": "research/seeds/study.yaml"}

#: Folder of each kind; a bare name is looked up in this order, for a study only in its own folder.
_FOLDERS: Mapping[Kind, Path] = {"run": _ROOT, "model": _ROOT / "models", "study": _ROOT / "studies"}


@dataclass(frozen=True)
class ShippedConfig:
    """A config file of the package."""

    name: str
    """Name by which it is found: ``demo``, ``models/llama-60m``."""
    kind: Kind
    file: Path

    @property
    def summary(self) -> str:
        """The first line of the file, a comment."""
        with self.file.open(encoding="utf-8") as lines:
            return lines.readline().lstrip("# ").strip()


def shipped_configs() -> list[ShippedConfig]:
    """List all of them: runs, then models, then studies, by name."""
    return [
        ShippedConfig(file.relative_to(_ROOT).with_suffix("").as_posix(), kind, file)
        for kind, folder in _FOLDERS.items()
        for file in sorted(folder.glob("*.yaml"))
    ]


def shipped_config(name: str, kind: Literal["run", "study"] = "run") -> Path | None:
    """Return the shipped file of that name; None if there is none.

    Args:
        name: ``demo``, ``models/llama-60m`` or ``llama-60m``, ``studies/sinks`` (``sinks`` if a study is meant). It
            may end in ``.yaml`` and begin with ``configs/``.
        kind: ``run`` (or the model of one) or ``study``.
    """
    names = [name.removeprefix("configs/").removesuffix(".yaml")]
    if "/" not in names[0]:
        names = [f"studies/{name}" for name in names] if kind == "study" else [*names, f"models/{names[0]}"]
    known = {config.name: config.file for config in shipped_configs()}
    return next((known[name] for name in names if name in known), None)


def nearest_config(name: str, kind: Literal["run", "study"] = "run") -> str | None:
    """Return the name of the shipped config that ``name`` was probably meant to be; None if it is like none."""
    wanted = [config.name for config in shipped_configs() if (config.kind == "study") == (kind == "study")]
    short = {full.rpartition("/")[2]: full for full in wanted}
    close = difflib.get_close_matches(name, short, n=1, cutoff=0.7)
    return short[close[0]] if close else None


def find_config(name: str | Path, kind: Literal["run", "study"] = "run") -> Path:
    """Find the config file of that name: an existing file, a shipped one, or that of the run in a folder.

    A folder hides no shipped config: people keep the run of a config in a folder of its name.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        if path.suffix == ".gguf":
            raise UsageError(f"{name}: is a GGUF model, and a config is needed; give a YAML file")
        return path
    shipped = shipped_config(str(name), kind)
    if shipped is not None:
        return shipped
    if path.is_dir():
        if kind == "run" and RunDir.is_run(path):
            return RunDir(path).config
        why = "without a run in it" if kind == "run" else "and no study"
        raise UsageError(f"{name}: is a folder {why}; give a YAML file")
    if kind == "study" and path.stem in _MOVED:
        raise UsageError(f"{name}: no such file; in the repository it is {_MOVED[path.stem]}")
    head, at, tail = str(name).rpartition("@")
    if at and kind == "run" and RunDir.is_run(Path(head)):
        raise UsageError(f"{name}: is a checkpoint, and a config is needed; give {head} for that of its run")
    if at and kind == "run" and (Path(head).is_file() or shipped_config(head) is not None):
        raise UsageError(f"{name}: is a birth, and a config is needed; give {head}, and init_seed {tail} beside it")
    close = nearest_config(path.stem, kind)
    hint = f"did you mean {close}?" if close else "birthmark configs lists those that come with the package"
    raise UsageError(f"{name}: no such file, nor a config that comes with the package; {hint}")
