"""Models that a study of lineage compares, and the pairs of them for each question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...measure.records import RunDir
from .trials import LineageTrials


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
            ends.append(StudyModel(trial.seed, trial.step, trial.arm, trial.run))
    return [*births, *trained, *ends]


@dataclass(frozen=True)
class Question:
    """A question that a study answers by a table of pairs."""

    title: str
    holds: Callable[[StudyModel, StudyModel, int], bool]
    """Function that says if a pair belongs to its table, given the last step that all bases have reached."""


def _ended(model: StudyModel, last: int) -> bool:
    return bool(model.continuation) or model.step == last


QUESTIONS = (
    Question("Distinct births", lambda a, b, last: a.step == b.step == 0),
    Question("Birth and trained model", lambda a, b, last: a.step == 0 < b.step and not b.continuation),
    Question(
        "Trained from other births on the same data in the same order",
        lambda a, b, last: a.step == b.step == last > 0 and not (a.continuation or b.continuation),
    ),
    Question(
        "Continued on other text",
        lambda a, b, last: bool(b.continuation) and (a.step == 0 or _ended(a, last)),
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
