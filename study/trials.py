"""Run of a study: its name, its state on disk, and its remaining work."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import RunError, UsageError
from ..measure.records import RunDir
from ..trainer.config import RunConfig
from ..trainer.saved_config import config_differences


@dataclass(frozen=True)
class Trial:
    """A run of a study: an arm born from a seed."""

    arm: str
    config: RunConfig
    """The whole run, with its seed, name and folder."""

    @property
    def seed(self) -> int:
        """Seed of its birth."""
        return self.config.init_seed

    @property
    def run(self) -> RunDir:
        """Folder of the run."""
        return RunDir(Path(self.config.run_dir))

    @property
    def label(self) -> str:
        """Short name: the end of its path."""
        return "/".join(self.run.path.parts[-2:])

    @property
    def config_file(self) -> Path:
        """The config that its process reads, beside the run's folder."""
        return self.run.path.with_suffix(".yaml")

    @property
    def log(self) -> Path:
        """File of its process' output, beside the run's folder."""
        return self.run.path.with_suffix(".log")

    @property
    def step(self) -> int:
        """Step of its last checkpoint; 0 if there is none."""
        return max(self.run.checkpoints_by_step(), default=0)

    @property
    def started(self) -> bool:
        """True if its birth is on disk."""
        return self.run.birth.is_file()

    @property
    def finished(self) -> bool:
        """True if it has been trained to its last step."""
        return self.started and self.step >= self.config.trainer.max_steps


class Planned(NamedTuple):
    """A study before it runs."""

    name: str
    """Name of the study, with the scale if it has one."""
    out: Path
    """Folder of the study."""
    trials: list[Trial]
    """Runs of the study; if runs build on one another, those that build on none."""


def make_trial(study: str, arm: str, seed: int, config: RunConfig, folder: Path) -> Trial:
    """Make the run of ``config`` from ``seed`` in ``folder/seed-N``, under the name ``STUDY-ARM-SEED``.

    In W&B the seeds of an arm are a group, and study and arm are tags.
    """
    group = f"{study}-{arm}"
    log = dataclasses.replace(
        config.log,
        group=config.log.group or group,
        tags=[*config.log.tags, *(tag for tag in dict.fromkeys((study, arm)) if tag not in config.log.tags)],
    )
    named = dataclasses.replace(
        config, init_seed=seed, name=f"{group}-{seed}", run_dir=str(folder / f"seed-{seed}"), log=log
    )
    return Trial(arm, named)


def each_once(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials in their order, without those that share an earlier one's run (arms of one config do)."""
    by_label: dict[str, Trial] = {}
    for trial in trials:
        by_label.setdefault(trial.label, trial)
    return list(by_label.values())


def chosen_trial(trials: Sequence[Trial], name: str) -> Trial:
    """Return the trial of this name, or of this index among those with separate runs, from 0.

    Raises:
        UsageError: there is none.
    """
    own = each_once(trials)
    if name.isdecimal() and int(name) < len(own):
        return own[int(name)]
    by_label = {trial.label: trial for trial in own}
    if name not in by_label:
        close = difflib.get_close_matches(name, by_label, n=1)
        hint = f"did you mean {close[0]}?" if close else f"give 0 to {len(own) - 1}, or a name such as {own[0].label}"
        raise UsageError(f"--trial {name}: no such trial; {hint}")
    return by_label[name]


def check_begins_with_births(base: Path, config: RunConfig, kind: str) -> None:
    """Raise UsageError if the base of a study of this kind starts from another model's weights."""
    if config.init_from:
        raise UsageError(f"{base}: init_from is {config.init_from!r}: a study of {kind} begins with births")


def check_buildable(trials: Sequence[Trial]) -> None:
    """Raise UsageError if an arm's model cannot be built, found without allocating it."""
    import torch

    from ..models.decoder import Decoder

    for trial in {trial.arm: trial for trial in trials}.values():
        try:
            with torch.device("meta"):
                Decoder(trial.config.model)
        except UsageError as error:
            raise UsageError(f"arm {trial.arm}: {error}") from None


def check_stored(trial: Trial) -> None:
    """Raise UsageError if a trial's folder holds a run of another config, RunError if it holds something else."""
    if not trial.started:
        left = list(trial.run.path.iterdir()) if trial.run.path.is_dir() else []
        # Files that a run writes before its birth.
        own = (trial.run.config.name, trial.run.tokenizer.name)
        if in_the_way := sorted(file.name for file in left if file.name not in own and not file.name.startswith(".")):
            raise RunError(f"{trial.run.path}: holds {in_the_way[0]}, but no {trial.run.birth.name}; move it away")
        return
    changed = [
        f"{name} {there!r} there, {here!r} here"
        for name, (there, here) in config_differences(trial.config, trial.run).items()
        # Its name and its logs do not change the trained model.
        if name not in ("name", "run_dir") and not name.startswith("log.")
    ]
    if changed:
        raise UsageError(
            f"{trial.run.path}: a run of another config ({', '.join(changed[:3])}{', …' if changed[3:] else ''}); "
            "give the --scale and --set that it was made with, or another --out, or move it away"
        )


def next_move(trial: Trial) -> Literal["start", "resume", "skip"]:
    """Return the next action for a trial whose folder passed :func:`check_stored`."""
    if trial.finished:
        return "skip"
    if trial.started:
        trial.run.read_birth()
        return "resume"
    return "start"
