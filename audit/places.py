"""The place of a checkpoint in training, as its name says it: stage, ingredient and step.

The one parser of such names. Its patterns are those of published suites:

- ``step1000`` (Pythia), ``step-125000`` (SmolLM2), ``step-480k-token-1007B`` (TinyLlama), ``ckpt_000`` (Amber),
  ``iter_0002384`` (MAP-Neo), ``global_step1000`` (BLOOM), ``checkpoint-500`` (the Trainer of ``transformers``);
- with stages ``stage1-step1000-tokens5B`` and ``stage2-ingredient1-step1000-tokens5B`` (OLMo 2),
  ``stage2-step47684-mix-round5-from-2T-ckpt`` (Olmo 3), ``stage1-step-40000`` and ``lc-4k-to-32k-step-4000`` (SmolLM3),
  ``CrystalCoder_phase1_checkpoint_055500`` (Crystal), ``extension_step0001220`` (Lucie).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

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


#: Patterns of stages, each with the rank and the words of what it finds.
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


class Place(NamedTuple):
    """A place in training; places compare in the order in which training passes through them."""

    stage: int
    """Rank of the stage; 0 where the name says none."""
    stage_words: str
    ingredient: int
    """Number of the training among those that begin at the end of one stage; 0 where the name says none."""
    beginning: str
    """Name of the checkpoint that the training began from, where it is another one than the end of the last stage."""
    step: int

    @property
    def chain(self) -> tuple[int, str, int, str]:
        """All but the step: the training whose checkpoints lie on one curve."""
        return self[:4]

    @property
    def words(self) -> str:
        """The place in words: ``stage 2 ingredient 1 step 10``."""
        ingredient = f"ingredient {self.ingredient}" if self.ingredient else ""
        return " ".join(part for part in (self.stage_words, ingredient, self.beginning, f"step {self.step}") if part)


def at_step(step: int) -> Place:
    """Make the place of a step in a training of one stage."""
    return Place(0, "", 0, "", step)


def said_place(name: str) -> Place | None:
    """Read the place that a checkpoint's name says; None where it says no step, or is that of a mean."""
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
    """List the places that a regular suite leaves out: of steps that mostly have one distance, those between that are
    multiples of it. An irregular suite leaves out none."""
    chains: dict[tuple[int, str, int, str], list[int]] = {}
    for place in sorted(set(places)):
        chains.setdefault(place.chain, []).append(place.step)
    missing = []
    for chain, steps in chains.items():
        gaps = [b - a for a, b in pairwise(steps)]
        usual, n = Counter(gaps).most_common(1)[0] if gaps else (0, 0)
        if n < 3 or n < 0.6 * sum(gap % usual == 0 for gap in gaps):
            continue
        for (begin, _), gap in zip(pairwise(steps), gaps, strict=True):
            if gap > usual and gap % usual == 0:
                missing += [Place(*chain, step) for step in range(begin + usual, begin + gap, usual)]
    return missing
