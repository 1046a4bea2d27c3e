"""Runs of a study of lineage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...trainer import initial_model
from ...trainer.config_file import read_config
from ..trials import Trial, check_begins_with_births, make_trial
from .compare import tests_that_fit
from .file import BASE, LineageStudy


@dataclass(frozen=True)
class LineageTrials:
    """The runs of a study."""

    study: LineageStudy
    """The study, with probes of a length that its models can read."""
    bases: list[Trial]
    """Runs of the bases, one from every seed."""
    continued: list[Trial]
    """Runs from a base's last checkpoint, for every base and continuation."""

    def base_of(self, trial: Trial) -> Trial:
        """Return the base that a continued run starts from."""
        return next(base for base in self.bases if base.seed == trial.seed)

    def ready(self) -> list[Trial]:
        """List continued runs whose base is finished, with the model and the tokenizer of the base in their configs."""
        return [
            dataclasses.replace(trial, config=initial_model.resolve_init_from(trial.config))
            for trial in self.continued
            if self.base_of(trial).finished
        ]


def lineage_trials(study: LineageStudy, out: Path, overrides: Mapping[str, Any] | None = None) -> LineageTrials:
    """List every run of ``study`` in the folder ``out``.

    Args:
        study: the study.
        out: the study's folder.
        overrides: dotted fields that replace those of the base, in continued runs too; a continuation's own fields win
            over them.

    Raises:
        UsageError: a run or a test is impossible; the message names it.
    """
    common = dict(overrides or {})
    base_config = read_config(study.base, common)
    check_begins_with_births(study.base, base_config, "lineage")
    every, last = base_config.trainer.checkpoint_every, base_config.trainer.max_steps
    for step in study.steps:
        if step > last or (step % every and step != last):
            raise UsageError(
                f"{study.file}: steps has {step}: {study.base.name} has checkpoints every {every} steps up to {last}"
            )
    bases = [make_trial(study.name, BASE, seed, base_config, out / BASE) for seed in study.init_seeds]
    continued = []
    for base in bases:
        for name, fields in study.continuations.items():
            try:
                config = read_config(study.base, {**common, **fields, "init_from": f"{base.run.path}@{last}"})
            except UsageError as error:
                raise UsageError(f"{study.file}: continue.{name}: {error}") from None
            continued.append(make_trial(study.name, name, base.seed, config, out / name))
    tests = tests_that_fit(study.file, study.tests, base_config.model)
    return LineageTrials(dataclasses.replace(study, tests=tests), bases, continued)
