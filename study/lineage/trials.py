"""The runs of a study of lineage, the models that come of them, and which pairs of these answer which question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...measure.records import RunDir
from ...trainer import initial_weights as start
from ..trials import Resolve, Trial, as_flags
from .compare import choose_probe
from .file import BASE, Lineage


@dataclass(frozen=True)
class Plan:
    """The runs of a study, all resolved."""

    study: Lineage
    """With probes as long as its models can read."""
    bases: list[Trial]
    """One from every seed."""
    continued: list[Trial]
    """From the last checkpoint of each of these, one for every continuation."""

    def base_of(self, trial: Trial) -> Trial:
        """The run that a continued one goes on from."""
        return next(base for base in self.bases if base.seed == trial.seed)

    def ready(self) -> list[Trial]:
        """Continued runs whose base is finished, with the model and tokenizer of what they go on from."""
        return [
            dataclasses.replace(trial, config=start.adopted(trial.config))
            for trial in self.continued
            if self.base_of(trial).finished
        ]


def plan(study: Lineage, out: Path, resolve: Resolve, common: Sequence[str] = ()) -> Plan:
    """Every run of ``study`` in ``out``.

    Args:
        study: what to run.
        out: the study's folder.
        resolve: how a base and flags become a run.
        common: flags that change the base, and with it all that goes on from it.

    Raises:
        UsageError: a run or a test is impossible; the message names it.
    """

    def trial(name: str, seed: int, *flags: str) -> Trial:
        flags = (*common, *flags, f"--init_seed={seed}", f"--name={study.name}-{name}-{seed}")
        return Trial(name, seed, study.base, flags, resolve(study.base, flags), RunDir(out / name / f"seed-{seed}"))

    bases = [trial(BASE, seed) for seed in study.init_seeds]
    config = bases[0].config
    if config.init_from:
        raise UsageError(f"{study.base}: init_from is {config.init_from!r}: a study of lineage begins with births")
    every, last = config.trainer.checkpoint_every, config.trainer.max_steps
    for step in study.steps:
        if step > last or (step % every and step != last):
            raise UsageError(
                f"{study.file}: steps has {step}: {study.base.name} has checkpoints every {every} steps up to {last}"
            )
    continued = []
    for base in bases:
        for name, fields in study.continuations.items():
            try:
                continued.append(
                    trial(name, base.seed, *as_flags(fields), f"--init_from={base.run.path}@{last}"),
                )
            except UsageError as error:
                raise UsageError(f"{study.file}: continue.{name}: {error}") from None
    tests = {}
    for name, test in study.tests.items():
        try:
            tests[name] = dataclasses.replace(test, probe=choose_probe(test.probe, test.seq_len, [config.model]))
        except UsageError as error:
            raise UsageError(f"{study.file}: tests.{name}: {error}") from None
    return Plan(dataclasses.replace(study, tests=tests), bases, continued)


# ── its models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Member:
    """One model of a study."""

    seed: int
    """Of its birth."""
    step: int
    """Of its run; 0 is a birth."""
    continuation: str
    """What its run is a continuation of the base by; empty: it is the base's."""
    run: RunDir

    @property
    def name(self) -> str:
        """What `open_source` finds it by."""
        return f"{self.run.path}@{self.step}"

    @property
    def label(self) -> str:
        """What people call it."""
        if self.step == 0:
            return f"birth {self.seed}"
        return f"{self.seed}{f' {self.continuation}' if self.continuation else ''}@{self.step}"


def members(planned: Plan) -> list[Member]:
    """Births, checkpoints and ends of continued runs that there are, in this order and by seed.

    Raises:
        UsageError: a finished run has lost a checkpoint that the study compares.
    """
    study, births, trained, ends = planned.study, [], [], []
    for trial in planned.bases:
        if not trial.started:
            continue
        births.append(Member(trial.seed, 0, "", trial.run))
        there = trial.run.checkpoints_by_step()
        lost = [step for step in study.steps if step not in there]
        if lost and trial.finished:
            raise UsageError(
                f"{trial.run.path}: has no checkpoint of step {lost[0]}, as steps of {study.file} asks for"
            )
        trained += [Member(trial.seed, step, "", trial.run) for step in there if step in (study.steps or there)]
    for trial in planned.continued:
        if trial.finished:
            ends.append(Member(trial.seed, trial.step, trial.arm, trial.run))
    return [*births, *trained, *ends]


@dataclass(frozen=True)
class Table:
    """One of the questions that a study answers."""

    title: str
    holds: Callable[[Member, Member, int], bool]
    """Whether it has a pair, given the last step that all bases have come to."""


def _ended(model: Member, last: int) -> bool:
    return bool(model.continuation) or model.step == last


TABLES = (
    Table("Distinct births", lambda a, b, last: a.step == b.step == 0),
    Table("Birth and trained model", lambda a, b, last: a.step == 0 < b.step and not b.continuation),
    Table(
        "Trained from other births on the same data in the same order",
        lambda a, b, last: a.step == b.step == last > 0 and not (a.continuation or b.continuation),
    ),
    Table(
        "Continued on other text",
        lambda a, b, last: bool(b.continuation) and (a.step == 0 or _ended(a, last)),
    ),
)
"""As in [SP], whose third has births in place of the one side: they are strangers of our second."""


def last_step(models: Iterable[Member]) -> int:
    """The last step that all bases among ``models`` have come to."""
    steps: dict[int, set[int]] = {}
    for model in models:
        if not model.continuation:
            steps.setdefault(model.seed, set()).add(model.step)
    return max(set.intersection(*steps.values()), default=0) if steps else 0


def pairs(models: Sequence[Member]) -> list[tuple[int, Member, Member]]:
    """Every pair that a table has: the table's index in `TABLES`, and two models, the elder first."""
    last = last_step(models)
    return [
        (i, a, b)
        for i, table in enumerate(TABLES)
        for place, b in enumerate(models)
        for a in models[:place]
        if table.holds(a, b, last)
    ]
