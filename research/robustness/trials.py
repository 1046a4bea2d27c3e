"""The file of a study of robustness (docs/studies.md), its runs, and a check that all of it can be done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...study.lineage.comparison import Comparison, read_tests, tests_that_fit
from ...study.study_file import Reader, ScaledStudy, read_scaled_study, where
from ...study.trials import Trial, check_begins_with_births, make_trial
from ...trainer.config_file import read_config
from .treatments import Treatment, read_treatment

#: Folder of the runs that are changed.
BASE = "base"
#: Name of the row of unchanged models.
UNCHANGED = "unchanged"
_FIELDS = ("base", "init_seeds", "changes", "test", "tests")


@dataclass(frozen=True, kw_only=True)
class RobustnessStudy(ScaledStudy):
    """A study file of the kind ``robustness``, checked and with its paths resolved."""

    changes: dict[str, Treatment]
    """Changes of every trained model, by name."""
    tests: dict[str, Comparison]
    """Tests by name."""


def read_robustness_study(file: Path) -> RobustnessStudy:
    """Read and check a study file of the kind ``robustness``; UsageError names the file and the field."""
    return read_scaled_study(file, _FIELDS, _at_one_scale)


def _at_one_scale(
    reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]
) -> RobustnessStudy:
    """Return the study at one scale; ``prefixes`` give the places of fields that are not at the top of the file."""

    for needed in ("base", "changes"):
        if needed not in content:
            raise UsageError(f"{reader.file}: {needed} is missing")
    seeds = reader.seeds(content.get("init_seeds", [0, 1, 2]), where(prefixes, "init_seeds"))
    if len(seeds) < 3:
        mend = "give at least three: one that is changed, one that is merged in, and a stranger of both"
        raise reader.wrong(where(prefixes, "init_seeds"), list(seeds), mend)
    return RobustnessStudy(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where(prefixes, "base")),
        init_seeds=seeds,
        changes=_changes(reader, content["changes"], where(prefixes, "changes")),
        tests=read_tests(reader, content, prefixes, {"dimensions": {}}),
    )


def _changes(reader: Reader, value: Any, at: str) -> dict[str, Treatment]:
    found = {}
    for name, fields in reader.named(value, at).items():
        if name == UNCHANGED:
            raise reader.wrong(f"a name in {at}", name, "the row of the trained models themselves has this name")
        try:
            found[name] = read_treatment(reader.group(fields, f"{at}.{name}"))
        except UsageError as error:
            if str(error).startswith(str(reader.file)):
                raise
            raise UsageError(f"{reader.file}: {at}.{name}: {error}") from None
    return found


# ---------------------------------------------------------------- trials
# Runs of a study of robustness, and the check that every treatment in its file suits them.


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
