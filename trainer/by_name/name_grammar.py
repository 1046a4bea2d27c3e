"""The grammar of a model's name, and one resolver for it: every command and Python read names by this module.

Nothing is loaded, and no network is asked, but for a run in a store, which its URL names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...data.config import is_remote
from ...errors import UsageError
from ...files import find_folder, user_path
from ...measure.records import RunDir, step_of
from ...models.exchange.gguf_header import names_gguf
from ...models.exchange.hub import is_path
from ...schema import SEEDS, quoted
from .shipped_configs import find_config, shipped_config

#: Kinds of names → the kind in words, for messages.
KINDS = {
    "run": "a run",
    "birth": "a birth of a config",
    "checkpoint": "a checkpoint without its run",
    "measured": "the snapshots of another training, without weights",
    "snapshot": "a snapshot, without weights",
    "gguf": "a GGUF model",
    "folder": "a folder of transformers",
    "hub": "a model of the hub",
}
#: An average of weights, as a name has it.
_AVERAGE = re.compile(r"ema|mean[1-9][0-9]{0,5}", re.ASCII)
Kind = Literal["run", "birth", "checkpoint", "measured", "snapshot", "gguf", "folder", "hub"]


@dataclass(frozen=True)
class ModelName:
    """A model's name, read."""

    text: str
    """Name, as the user gave it."""
    kind: Kind
    path: Path
    """Folder of the run, the checkpoint, the snapshots or the model; file of the config; the text of a hub id."""
    number: int | None = None
    """Step of a run (0: its birth; None: its last checkpoint), or seed of a birth (None: the config's own)."""
    average: str = ""
    """Average of a run's weights that is meant in place of them: ``ema``, or ``meanK`` of K checkpoints."""
    url: str = ""
    """URL, without credentials, of a run in a store, whose copy ``path`` is."""

    @property
    def run(self) -> RunDir:
        """The run, or the folder of snapshots."""
        return RunDir(self.path)

    @property
    def lasting(self) -> str:
        """Name of the run that a config may keep: its URL in a store, since a copy of it may go; else its folder."""
        return self.url or str(self.path)

    @property
    def is_whole(self) -> bool:
        """True if it is a run or its snapshots, without a step or an average."""
        return self.kind in ("run", "measured") and self.number is None and not self.average

    @property
    def is_one_snapshot(self) -> bool:
        """True if it means one measurement: of a step of a run, or a folder of one."""
        of_step = self.kind in ("run", "measured") and self.number is not None and not self.average
        return of_step or self.kind == "snapshot"

    @property
    def in_words(self) -> str:
        """Kind of the name, for messages."""
        if self.average:
            return "an average of a run's weights"
        if self.kind == "measured" and self.number is not None:
            return "one of the snapshots of a training"
        if self.kind == "run" and self.number is not None:
            return f"the checkpoint of step {self.number} of a run" if self.number else "the birth of a run"
        return KINDS[self.kind]


def read_name(text: str) -> ModelName:
    """Read a model's name.

    Args:
        text: ``RUN``, ``RUN@STEP``, a checkpoint's folder, each with ``@ema`` or ``@meanK`` for an average of its
            weights; ``CONFIG@SEED`` or ``CONFIG``, a folder of ``transformers``, a GGUF file or a folder that holds
            one, or a hub id, ``@REVISION`` if wanted; also the folder of snapshots without a run, and of one snapshot,
            which some commands read. What exists as a path comes first. A run may be given by its URL in a store: its
            files are copied to a cache.

    Raises:
        UsageError: it can be no name of a model, or what follows the ``@`` is no step or seed; or a store refuses.
        RunError: a store fails.
    """
    if not text.strip():
        raise UsageError("'': a name is empty; give a run, a config, a folder, a GGUF file or a hub id")
    if is_remote(text) and not text.lower().startswith(("http://", "https://")):
        from ..checkpoints.stored_run import run_here, url_of_run

        return replace(read_name(run_here(text)), text=text, url=url_of_run(text))
    whole, (head, at, tail) = user_path(text), text.rpartition("@")
    if RunDir.is_run(whole):
        return ModelName(text, "run", whole)
    if at and head and _AVERAGE.fullmatch(tail) and (averaged := read_name(head)).kind == "run":
        return replace(averaged, text=text, average=tail)
    if at and head and RunDir.is_run(user_path(head)):
        return ModelName(text, "run", user_path(head), _number(text, tail, "step"))
    if (found := _inside(text, whole)) is not None:
        return found
    if _is_measured(whole):
        return ModelName(text, "measured", whole)
    if at and head and _is_measured(user_path(head)):
        return ModelName(text, "measured", user_path(head), _number(text, tail, "step"))
    if (config := _config_file(whole)) is not None:
        return ModelName(text, "birth", config)
    if at and (config := _config_file(user_path(head or "@"), is_alone=False)) is not None:
        return ModelName(text, "birth", config, _number(text, tail, "seed"))
    if names_gguf(str(whole)):
        return ModelName(text, "gguf", whole)
    # What is no path is the hub's to know.
    return ModelName(text, "folder" if whole.is_dir() or is_path(text) else "hub", whole)


def _inside(text: str, folder: Path) -> ModelName | None:
    """Read the folder of a checkpoint or of a snapshot; None for any other path."""
    if not folder.name:  # the root, or the working folder
        return None
    present = find_folder(folder)
    if (present / "state.json").is_file():
        run = folder.absolute().parent.parent
        if RunDir.is_run(run):
            # As it was given, where that is possible.
            parent = folder.parent.parent if len(folder.parts) > 2 else run
            return ModelName(text, "run", parent, step_of(folder))
        return ModelName(text, "checkpoint", folder)
    if (present / "summary.json").is_file():
        return ModelName(text, "snapshot", folder)
    return None


def _is_measured(folder: Path) -> bool:
    run = RunDir(folder)
    return run.is_only_measured and bool(run.snapshot_folders())


def _config_file(path: Path, *, is_alone: bool = True) -> Path | None:
    """Find a config file by path or by name; None if ``path`` is something else. A folder hides a shipped config that
    stands alone, not one with a seed.
    """
    if path.suffix in (".yaml", ".yml"):
        return find_config(path)
    hidden = path.exists() if is_alone else path.is_file()
    return None if hidden else shipped_config(str(path))


def _number(name: str, text: str, what: str) -> int:
    # No step is larger than any seed.
    if not text.isdecimal() or len(text) > len(str(SEEDS[1])) or int(text) > SEEDS[1]:
        raise UsageError(f"{name}: {quoted(text)} is no {what}: give a whole number up to {SEEDS[1]} after the @")
    return int(text)


# ---------------------------------------------------------------- requests that only some names serve


def at_step(text: str, step: int | None) -> str:
    """Return the name of a run's model with the step of ``--step`` in it; the name alone without a step.

    Raises:
        UsageError: it names no whole run.
    """
    if step is None:
        return text
    found = read_name(text)
    if found.kind == "run" and found.number is not None:
        raise UsageError(f"--step {step}: {text} says its step itself; leave one of them out")
    if found.kind != "run":
        raise UsageError(f"--step {step}: {text} is no run's folder; leave --step out")
    return f"{found.path}@{step}" + (f"@{found.average}" if found.average else "")


def whole_run(text: str, need: str) -> RunDir:
    """Open the run that a name means, for what shows or reads a whole run.

    Args:
        text: the name.
        need: reason, for the message that refuses another kind: "a figure shows a whole run".

    Raises:
        UsageError: it names one checkpoint, or no run.
    """
    found = read_name(text)
    if found.kind in ("run", "measured"):
        if not found.is_whole:
            raise UsageError(f"{text}: is {found.in_words}; {need}: give {found.path}")
        return RunDir.open_measured(found.path)
    if found.kind in ("birth", "checkpoint", "snapshot", "gguf") or (found.path / "config.json").is_file():
        raise UsageError(f"{text}: is {found.in_words}; {need}: give the folder that `pretrain` wrote")
    if found.path.is_file():
        raise UsageError(f"{text}: is a file; {need}: give folders of runs, {found.path.parent}/*/ for those beside it")
    return RunDir.open_measured(found.path)
