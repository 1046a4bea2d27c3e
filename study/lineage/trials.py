"""The file of a study of lineage (docs/studies.md), its runs, and the pairs of models that answer its questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...measure.records import RunDir
from ...trainer import initial_model
from ...trainer.config_file import read_config
from ..study_file import Reader, ScaledStudy, read_scaled_study, where
from ..trials import Trial, check_begins_with_births, make_trial
from .comparison import Comparison, read_tests, tests_that_fit

#: Folder of the runs that continued runs start from.
BASE = "base"
_FIELDS = ("base", "init_seeds", "steps", "continue", "test", "tests")
_DEFAULT_TESTS: dict[str, Any] = {"dimensions": {}, "published": {"null": "analytic"}}


@dataclass(frozen=True, kw_only=True)
class LineageStudy(ScaledStudy):
    """A study file of the kind ``lineage``, checked and with its paths resolved."""

    steps: tuple[int, ...]
    """Checkpoints of the base that are compared; none: all. With its end, where runs continue from it."""
    continuations: dict[str, dict[str, Any]]
    """Name → dotted fields in which the continued run differs from the base."""
    tests: dict[str, Comparison]
    """Tests by name; the first is drawn as a matrix."""


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_lineage_study(file: Path) -> LineageStudy:
    """Read and check a study file of the kind ``lineage``; UsageError names the file and the field."""
    return read_scaled_study(file, _FIELDS, _at_one_scale)


def _at_one_scale(reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]) -> LineageStudy:
    """Return the study at one scale; ``prefixes`` give the places of fields that are not at the top of the file."""

    if "base" not in content:
        raise UsageError(f"{reader.file}: base is missing")
    seeds = reader.seeds(content.get("init_seeds", [0, 1]), where(prefixes, "init_seeds"))
    if len(seeds) < 2:
        raise reader.wrong(where(prefixes, "init_seeds"), list(seeds), "give at least two: strangers are the control")
    continuations = reader.changes(content.get("continue", {}), where(prefixes, "continue"))
    for continuation, fields in continuations.items():
        if continuation == BASE:
            raise reader.wrong(
                f"a name in {where(prefixes, 'continue')}", BASE, "the runs that it continues have this name"
            )
        if "init_from" in fields:
            field = f"{where(prefixes, 'continue')}.{continuation}.init_from"
            raise reader.wrong(field, fields["init_from"], "the study sets it, leave it out")
    return LineageStudy(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where(prefixes, "base")),
        init_seeds=seeds,
        steps=_steps(reader, content.get("steps", []), where(prefixes, "steps")),
        continuations=continuations,
        tests=read_tests(reader, content, prefixes, _DEFAULT_TESTS),
    )


def _steps(reader: Reader, value: Any, field: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(step) is int and step > 0 for step in value)
    if not whole or len(set(value)) < len(value):
        raise reader.wrong(field, value, "give a list of different steps from 1, or leave it out for all checkpoints")
    return tuple(sorted(value))


# ---------------------------------------------------------------- runs of a study of lineage


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
    # What continues is compared with what it began from.
    steps = tuple(sorted({*study.steps, last})) if study.steps and continued else study.steps
    return LineageTrials(dataclasses.replace(study, tests=tests, steps=steps), bases, continued)


# ---------------------------------------------------------------- pairs
# Models that a study of lineage compares, and the pairs of them for each question.


@dataclass(frozen=True)
class StudyModel:
    """A model of a study: a birth, a checkpoint of a base, or the end of a continued run."""

    seed: int
    """Seed of its birth."""
    step: int
    """Step of its run; 0 is a birth."""
    continuation: str
    """Name of the continuation that its run is; empty: its run is a base."""
    run: RunDir
    began_at: int = 0
    """Step of the base that its run began from; 0 for a base."""

    @property
    def age(self) -> int:
        """Optimizer steps since its birth."""
        return self.began_at + self.step

    @property
    def name(self) -> str:
        """Name for `open_source`."""
        return f"{self.run.path}@{self.step}"

    @property
    def label(self) -> str:
        """Name in tables and pictures."""
        if self.step == 0:
            return f"birth {self.seed}"
        return f"{self.seed}{f' {self.continuation}' if self.continuation else ''}@{self.step}"


def study_models(trials: LineageTrials) -> list[StudyModel]:
    """List births, checkpoints and ends of continued runs on disk, in this order and by seed.

    Raises:
        UsageError: a finished run has lost a checkpoint that the study compares.
    """
    study, births, trained, ends = trials.study, [], [], []
    for trial in trials.bases:
        if not trial.started:
            continue
        births.append(StudyModel(trial.seed, 0, "", trial.run))
        on_disk = trial.run.checkpoints_by_step()
        lost = [step for step in study.steps if step not in on_disk]
        if lost and trial.finished:
            raise UsageError(
                f"{trial.run.path}: has no checkpoint of step {lost[0]}, as steps of {study.file} asks for"
            )
        trained += [StudyModel(trial.seed, step, "", trial.run) for step in on_disk if step in (study.steps or on_disk)]
    for trial in trials.continued:
        if trial.finished:
            began_at = trials.base_of(trial).config.trainer.max_steps
            ends.append(StudyModel(trial.seed, trial.step, trial.arm, trial.run, began_at))
    return [*births, *trained, *ends]


@dataclass(frozen=True)
class Question:
    """A question that a study answers by a table of pairs."""

    title: str
    holds: Callable[[StudyModel, StudyModel, int], bool]
    """Function that says if a pair belongs to its table, given the last step that all bases have reached."""


QUESTIONS = (
    Question("Distinct births", lambda a, b, last: a.step == b.step == 0),
    Question("Birth and trained model", lambda a, b, last: a.step == 0 < b.step and not b.continuation),
    Question(
        "Trained from other births on the same data in the same order",
        lambda a, b, last: a.step == b.step == last > 0 and not (a.continuation or b.continuation),
    ),
    Question(
        "Continued on other text",
        lambda a, b, last: bool(b.continuation) and (bool(a.continuation) or a.step in (0, b.began_at)),
    ),
)
"""As in [SP], but its third compares births with trained models; these pairs are the strangers of our second."""


def last_step(models: Iterable[StudyModel]) -> int:
    """Return the last step that all bases among ``models`` have reached."""
    steps: dict[int, set[int]] = {}
    for model in models:
        if not model.continuation:
            steps.setdefault(model.seed, set()).add(model.step)
    return max(set.intersection(*steps.values()), default=0) if steps else 0


def model_pairs(models: Sequence[StudyModel]) -> list[tuple[int, StudyModel, StudyModel]]:
    """List every pair of every table: the question's index in `QUESTIONS`, and two models, the elder first."""
    last = last_step(models)
    return [
        (i, a, b)
        for i, question in enumerate(QUESTIONS)
        for place, b in enumerate(models)
        for a in models[:place]
        if question.holds(a, b, last)
    ]
