"""What is said of an intervention follows from its numbers."""

import numpy as np
import pytest

from birthmark.findings.interventions import intervention_in_words, intervention_sentence, strongest_pass
from birthmark.measure.intervention_kinds import Intervention
from birthmark.measure.interventions import Intervened, PassFigures


def passed(dose, attention, to_first, losses=None):
    """A pass over two blocks of one head, as much in each."""
    keys = np.ones((2, len(attention)))
    by_head = keys[:, None]
    figures = [by_head * attention, by_head * to_first, *([keys] * 5)]
    return PassFigures(dose, *figures, None if losses is None else np.array(losses))


def said(what, *passes):
    # Uniform attention to key 20 of 64 is .026, to key 0 .060.
    return intervention_sentence(Intervened(what, 16, 64, list(passes)))


MASK = Intervention("mask", (1,), (20,))
DOSES = Intervention("amplify", (1,), (20,), lambdas=(4.0, 8.0))
UNIT = Intervention("ablate_unit", (12,), units=(1229,))


@pytest.mark.parametrize(
    ("what", "passes", "sentence"),
    [
        (MASK, [(None, [0.009], [0.470]), (1.0, [0.256], [0.263])],
         "A sink forms at 20: attention to it goes from 0.009 to 0.256, as much as to key 0 (0.263, before 0.470)."),
        (MASK, [(None, [0.009], [0.470]), (1.0, [0.119], [0.379])],
         "A sink forms at 20: attention to it goes from 0.009 to 0.119; key 0 gets 0.379 (before 0.470)."),
        (MASK, [(None, [0.009], [0.470]), (1.0, [0.010], [0.470])],
         "No sink forms at 20: attention to it goes from 0.009 to 0.010; key 0 gets 0.470 (before 0.470)."),
        (DOSES, [(None, [0.009], [0.470]), (4.0, [0.050], [0.470]), (8.0, [0.100], [0.4])],
         "A sink forms at 20: attention to it goes from 0.009 to 0.100, at λ 8; key 0 gets 0.400 (before 0.470)."),
        (UNIT, [(None, [0.470], [0.470], [3.5, 3.6]), (1.0, [0.100], [0.100], [5.0, 5.2])],
         "The sink at 0 goes: attention to it falls from 0.470 to 0.100. The loss goes from 3.55 to 5.10 nats per "
         "token (+1.550 ± 0.050)."),
        (UNIT, [(None, [0.470], [0.470]), (1.0, [0.300], [0.300])],
         "The sink at 0 weakens: attention to it goes from 0.470 to 0.300."),
        (UNIT, [(None, [0.470], [0.470], [3.5, 3.6]), (1.0, [0.460], [0.460], [3.4, 3.5])],
         "The sink at 0 stays: attention to it goes from 0.470 to 0.460. The loss goes from 3.55 to 3.45 nats per "
         "token (-0.100 ± 0.000)."),
        (UNIT, [(None, [0.061], [0.061]), (1.0, [0.060], [0.060])],
         "There is no sink at 0: attention to it goes from 0.061 to 0.060."),
    ],
)  # fmt: skip
def test_a_sentence_says_what_formed_and_what_went(what, passes, sentence):
    assert said(what, *(passed(*one) for one in passes)) == sentence


def test_every_key_has_its_sentence_and_the_strongest_dose_speaks():
    what = Intervention("scale", (1,), (20, 30), lambdas=(2.0, 8.0, 16.0))
    on_keys = [(0.009, 0.008), (0.01, 0.008), (0.2, 0.008), (0.1, 0.02)]
    passes = [passed(dose, [*keys], [0.4, 0.4]) for dose, keys in zip((None, *what.lambdas), on_keys, strict=True)]
    found = Intervened(what, 16, 64, passes)
    assert strongest_pass(found) == 2
    first, second = intervention_sentence(found).split(". ")
    assert first.startswith("A sink forms at 20")
    assert second.startswith("No sink forms at 30")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (Intervention("mask", tuple(range(1, 13)), (20,)), "mask at position 20 in blocks 1–12"),
        (Intervention("scale", (1, 2, 5), (3, 9), matched=True), "matched scale at positions 3, 9 in blocks 1–2, 5"),
        (UNIT, "ablate unit 1229 in block 12"),
        (Intervention("ablate_channel", (2,), (4,), channels=(7, 8)), "ablate channels 7–8 at position 4 in block 2"),
        (Intervention("ablate_value", (2,), (0,)), "ablate value at position 0 in block 2"),
    ],
)
def test_an_intervention_in_words(what, words):
    assert intervention_in_words(what) == words
