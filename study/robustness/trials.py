"""The runs of a study of robustness, and whether everything in its file can be done to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...trainer.config_file import read_config
from ..lineage.compare import tests_that_fit
from ..trials import Trial, check_begins_with_births, make_trial
from .file import BASE, RobustnessStudy


@dataclass(frozen=True)
class RobustnessTrials:
    """The runs of a study."""

    study: RobustnessStudy
    """The study, with probes of a length that its models can read."""
    bases: list[Trial]
    """One run from every seed."""


def robustness_trials(
    study: RobustnessStudy, out: Path, overrides: Mapping[str, Any] | None = None
) -> RobustnessTrials:
    """Every run of ``study`` in the folder ``out``.

    Args:
        study: what to run.
        out: the study's folder.
        overrides: dotted fields that replace those of the base.

    Raises:
        UsageError: a run, a change or a test is impossible; the message names it.
    """
    config = read_config(study.base, dict(overrides or {}))
    check_begins_with_births(study.base, config, "robustness")
    for name, change in study.changes.items():
        try:
            change.check(config.model)
            for path in change.paths:
                read_config(study.base, {**(overrides or {}), "data.path": path})
        except UsageError as error:
            raise UsageError(f"{study.file}: changes.{name}: {error}") from None
    bases = [make_trial(study.name, BASE, seed, config, out / BASE) for seed in study.init_seeds]
    tests = tests_that_fit(study.file, study.tests, config.model)
    return RobustnessTrials(dataclasses.replace(study, tests=tests), bases)
