"""Runs of a study of robustness, and the check that every treatment in its file suits them."""

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
    """Runs of the bases, one from every seed."""


def robustness_trials(
    study: RobustnessStudy, out: Path, overrides: Mapping[str, Any] | None = None
) -> RobustnessTrials:
    """List every run of ``study`` in the folder ``out``.

    Args:
        study: the study.
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
