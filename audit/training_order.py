"""The order of checkpoints in training: by their names, in chains, with the direction."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from ..metrics.weight_kinship import Steps, steps_of

# ---------------------------------------------------------------- places
# The place of a checkpoint in training, as its name says it: stage, ingredient and step.
#
# The one parser of such names. Its patterns are those of published suites:
#
# - ``step1000`` (Pythia), ``step-125000`` (SmolLM2), ``step-480k-token-1007B`` (TinyLlama), ``ckpt_000`` (Amber),
#   ``iter_0002384`` (MAP-Neo), ``global_step1000`` (BLOOM), ``checkpoint-500`` (the Trainer of ``transformers``);
# - with stages ``stage1-step1000-tokens5B`` and ``stage2-ingredient1-step1000-tokens5B`` (OLMo 2),
#   ``stage2-step47684-mix-round5-from-2T-ckpt`` (Olmo 3), ``stage1-step-40000`` and ``lc-4k-to-32k-step-4000``
#   (SmolLM3),
#   ``CrystalCoder_phase1_checkpoint_055500`` (Crystal), ``extension_step0001220`` (Lucie).

_SCALES = {"": 1, "k": 1_000, "m": 1_000_000}
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?step|step|checkpoint|ckpt|iteration|iter)[-_=]?(\d+)(?!\d)(?:([km])(?![a-z0-9]))?",
    re.IGNORECASE,
)
#: Stages that continue the pre-training of a suite come behind its numbered ones.
_BEHIND = 1_000


def _numbered(found: re.Match[str]) -> tuple[int, str]:
    return int(found[2]), f"{found[1].lower()} {int(found[2])}"


def _longer_context(found: re.Match[str]) -> tuple[int, str]:
    return _BEHIND + int(found[1]), found[0].lower()


def _extension(found: re.Match[str]) -> tuple[int, str]:
    return _BEHIND, found[0].lower()


#: Patterns of stages, each with its rank and the words of its match.
_STAGES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[int, str]]], ...] = (
    (re.compile(r"(?<![a-z])(stage|phase)[-_]?(\d+)", re.IGNORECASE), _numbered),
    (re.compile(r"(?<![a-z])lc-(\d+)k-to-\d+k", re.IGNORECASE), _longer_context),
    (re.compile(r"(?<![a-z])extension(?=[-_])", re.IGNORECASE), _extension),
)
#: Patterns of trainings that begin together and go apart: by the number of the data's order, or by where they begin.
_INGREDIENT = re.compile(r"(?<![a-z])ingredient[-_]?(\d+)(?![+\d])", re.IGNORECASE)
_BEGINS_FROM = re.compile(r"(?<=\d)-([a-z][\w-]*from-[\w-]+)$", re.IGNORECASE)
#: Names of means of checkpoints, which no training passed through.
_MEAN = re.compile(r"(?<![a-z])(?:soup|souped|merged?|averaged?)(?![a-z])|ingredient\d+(?:\+\d+)+", re.IGNORECASE)


#: Names of the runs or folders that a checkpoint is of, where a suite has several that went apart before its step: each
#: parting adds one.
Run = tuple[str, ...]


class Training(NamedTuple):
    """The parts of a place (`Place`) that all checkpoints of one training share."""

    stage: int
    stage_words: str
    ingredient: int
    beginning: str
    run: Run


class Place(NamedTuple):
    """A place in training; places are ordered like training passes through them."""

    stage: int
    """Rank of the stage; 0 where the name says none."""
    stage_words: str
    ingredient: int
    """Number of the training among those that begin at the end of one stage; 0 if the name has none."""
    beginning: str
    """Name of the checkpoint that the training began from, where it is another one than the end of the last stage."""
    step: int
    run: Run = ()

    @property
    def chain(self) -> Training:
        """All parts but the step: the training whose checkpoints lie on one curve."""
        return Training(self.stage, self.stage_words, self.ingredient, self.beginning, self.run)

    @property
    def words(self) -> str:
        """The place in words: ``stage 2 ingredient 1 step 10``."""
        ingredient = f"ingredient {self.ingredient}" if self.ingredient else ""
        run = f"of {self.run[-1]}" if self.run else ""
        parts = (self.stage_words, ingredient, self.beginning, f"step {self.step}", run)
        return " ".join(part for part in parts if part)


def at_step(step: int) -> Place:
    """Make the place of a step in a training of one stage."""
    return Place(0, "", 0, "", step)


def said_place(name: str) -> Place | None:
    """Read the place in a checkpoint's name; None if the name has no step, or is that of a mean."""
    steps = _STEP.findall(name)
    if not steps or _MEAN.search(name):
        return None
    number, scale = steps[-1]
    stage = next((words_of(found) for pattern, words_of in _STAGES if (found := pattern.search(name))), (0, ""))
    ingredient, beginning = _INGREDIENT.search(name), _BEGINS_FROM.search(name)
    return Place(
        *stage,
        int(ingredient[1]) if ingredient else 0,
        beginning[1] if beginning else "",
        int(number) * _SCALES[scale.lower()],
    )


def missing_places(places: Iterable[Place]) -> list[Place]:
    """List the places missing from a regular suite: if most steps have the same distance, its missing multiples between
    them. An irregular suite, or one that lacks more places than it has, has none.
    """
    by_training: dict[Training, list[Place]] = {}
    for place in sorted(set(places)):
        by_training.setdefault(place.chain, []).append(place)
    missing: list[Place] = []
    for present in by_training.values():
        steps = [place.step for place in present]
        gaps = [b - a for a, b in pairwise(steps)]
        usual, n = Counter(gaps).most_common(1)[0] if gaps else (0, 0)
        if n < 3 or n < 0.6 * sum(gap % usual == 0 for gap in gaps):
            continue
        if sum(gap // usual - 1 for gap in gaps if gap % usual == 0) > len(steps):
            continue
        for (begin, _), gap in zip(pairwise(steps), gaps, strict=True):
            if gap > usual and gap % usual == 0:
                missing += [present[0]._replace(step=step) for step in range(begin + usual, begin + gap, usual)]
    return missing


# ---------------------------------------------------------------- the trainings of a suite as chains of checkpoints
# Each stage, and each ingredient of a stage, is one.


class Chain(NamedTuple):
    """Checkpoints that one training passed through."""

    stage: int
    own: list[int]
    """Checkpoints of this training in the order of their steps."""
    begins_from: int | None
    """The last checkpoint of the stage before, if the suite has one."""

    @property
    def path(self) -> list[int]:
        """Checkpoints of the chain, with the one that the training began from in front."""
        return self.own if self.begins_from is None else [self.begins_from, *self.own]


def chains(places: Mapping[int, Place], distance_MM: np.ndarray) -> list[Chain]:
    """Divide checkpoints into chains, in the order of training.

    If the stage before has several ends, a chain begins from the nearest. Runs begin from the last checkpoint before
    they went apart.
    """
    by_training: dict[Training, list[int]] = {}
    for i, place in sorted(places.items(), key=lambda item: (item[1], item[0])):
        by_training.setdefault(place.chain, []).append(i)
    found: list[Chain] = []
    for training, own in by_training.items():
        stage = training.stage
        earlier = [chain for chain in found if chain.stage < stage]
        ends = [chain.own[-1] for chain in earlier if chain.stage == earlier[-1].stage]
        for n_partings in range(len(training.run)):
            if shared := by_training.get(training._replace(run=training.run[:n_partings])):
                ends = shared[-1:]
        known = bool(ends) and not training.beginning
        found.append(Chain(stage, own, min(ends, key=lambda end: distance_MM[end, own[0]]) if known else None))
    return found


def steps_of_chains(found: Iterable[Chain]) -> Steps:
    """Return the steps of all chains as pairs of checkpoints."""
    return frozenset().union(*(steps_of(chain.path) for chain in found))


# ---------------------------------------------------------------- the earlier end of a path of checkpoints
# A path through weights is as short from its end as from its beginning. What only a birth has tells the ends apart:
# there every gain is 1 and every bias 0, so that the vectors of a model are constant, and the first steps of training
# make them vary. Later they vary more and more, unless weight decay holds them.

#: The vectors of the later end must vary so many times as much as those of the earlier one, median over vectors.
GROWTH = 2.0


class Direction(NamedTuple):
    """Direction of a path, from its first and its last checkpoint."""

    towards: Literal["as labelled", "reversed", "unknown"]
    why: str
    """The evidence in a sentence."""


def find_direction(first: Mapping[str, float], last: Mapping[str, float]) -> Direction:
    """Decide if training passed from the first checkpoint to the last.

    Only a constant vector is evidence for "reversed": decreasing variation may come from weight decay.

    Args:
        first: tensor of one axis → standard deviation of its values, exactly 0 where all are alike.
        last: the same for the other end.
    """
    names = first.keys() & last.keys()
    begin, end = (sum(a[name] == 0 < b[name] for name in names) for a, b in ((first, last), (last, first)))
    if bool(begin) != bool(end):
        born, other = ("first", "last") if begin else ("last", "first")
        why = (
            f"{begin or end} of {len(names)} vectors of gains and biases are constant at the {born} checkpoint, "
            f"as at birth, and not at the {other}"
        )
        return Direction("as labelled" if begin else "reversed", why)
    grown = [last[name] / first[name] for name in names if first[name] > 0]
    if grown and (growth := float(np.median(grown))) >= GROWTH:
        why = f"gains and biases vary {growth:.1f} times as much at the last checkpoint as at the first"
        return Direction("as labelled", why)
    why = "at neither end are gains and biases constant, as at birth, and they do not grow"
    return Direction("unknown", why if names else "the model has no gains or biases, which are constant at birth")
