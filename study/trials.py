"""One run of a study: what it is called, where it stands, what has to be done for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import RunError, UsageError
from ..files import read_json
from ..measure.records import RunDir
from ..trainer.config import RunConfig
from ..trainer.stored_config import departures
from .reading import _OURS

Resolve = Callable[[Path, Sequence[str]], RunConfig]
"""From a run's config file and flags ``--field=value`` to the run."""


@dataclass(frozen=True)
class Trial:
    """One run of a study: an arm born from a seed."""

    arm: str
    seed: int
    base: Path
    flags: tuple[str, ...]
    """What the base's config is changed by, ``--field=value``."""
    config: RunConfig
    """The whole run."""
    run: RunDir

    @property
    def label(self) -> str:
        """What people call it: the end of its path."""
        return "/".join(self.run.path.parts[-2:])

    @property
    def log(self) -> Path:
        """What its process says."""
        return self.run.path.with_suffix(".log")

    @property
    def step(self) -> int:
        """Step of its last checkpoint; 0 if there is none."""
        return max(self.run.checkpoints_by_step(), default=0)

    @property
    def started(self) -> bool:
        """Whether it has been born."""
        return self.run.birth.is_file()

    @property
    def finished(self) -> bool:
        """Whether it has been trained to its last step."""
        return self.started and self.step >= self.config.trainer.max_steps


def common_flags(settings: Sequence[str]) -> list[str]:
    """Flags from ``FIELD=VALUE`` words; UsageError names the one that is neither."""
    for setting in settings:
        field, equals, _ = setting.partition("=")
        if not equals or not field or field in _OURS:
            why = "the study decides it" if field in _OURS else "write FIELD=VALUE, as in trainer.max_steps=100"
            raise UsageError(f"--set {setting}: {why}")
    return [f"--{setting}" for setting in settings]


def as_flags(fields: Mapping[str, Any]) -> list[str]:
    """Dotted fields as the command line takes them."""
    return [f"--{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in fields.items()]


def check_buildable(planned: Sequence[Trial]) -> None:
    """UsageError if an arm's model cannot be built, found without allocating it."""
    import torch

    from ..models.decoder import Decoder

    for trial in {trial.arm: trial for trial in planned}.values():
        try:
            with torch.device("meta"):
                Decoder(trial.config.model)
        except UsageError as error:
            raise UsageError(f"arm {trial.arm}: {error}") from None


def check_stored(trial: Trial) -> None:
    """UsageError if a run stands in the trial's folder that is not the trial's."""
    if not trial.started:
        return
    changed = [
        f"{name} {there!r} there, {here!r} here"
        for name, (there, here) in departures(trial.config, trial.run).items()
        if name not in ("name", "run_dir")
    ]
    if changed:
        raise UsageError(
            f"{trial.run.path}: a run of another config ({', '.join(changed[:3])}{', …' if changed[3:] else ''}); "
            "move it away or give another --out"
        )


def next_move(trial: Trial) -> Literal["start", "resume", "skip"]:
    """What has to be done for a trial. A folder of a run that died before its birth is made ready to start again."""
    if trial.finished:
        return "skip"
    if trial.started:
        read_json(trial.run.birth)
        return "resume"
    left = list(trial.run.path.iterdir()) if trial.run.path.is_dir() else []
    foreign = [file for file in left if file.name != trial.run.config.name and not file.name.startswith(".")]
    if foreign:
        raise RunError(f"{trial.run.path}: holds {foreign[0].name}, but no run; move it away")
    trial.run.config.unlink(missing_ok=True)
    return "start"
