"""Sentences about runs: true to the numbers by a check of their own, and silent or honest where numbers are missing."""

import ast
import inspect
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from birthmark.findings import inactive_sections
from birthmark.findings.formatting import in_ascii, p_in_prose
from birthmark.findings.inactive_sections import why_inactive
from birthmark.findings.run_history import RunHistory
from birthmark.findings.thresholds import THRESHOLDS
from birthmark.measure.metrics_log import MetricsLog
from birthmark.measure.records import RunDir, Snapshot
from birthmark.report.verdicts import legend_of_marks, verdicts

#: The demo's end, as a run of it left it.
BIRTH = {"inter": 0.389, "kl_uniform": 0.2, "preference_ratio": 9.3, "alignment": 0.626, "rank_persistence": 1.0}
END = {
    "alignment": 0.151, "alignment_stranger": 0.019, "drift": 0.21, "energy_share_chance": 1 / 192,
    "rank_persistence": 0.013, "rank_persistence_stranger": 0.022, "sink_mass": 0.03, "sink_mass_max": 0.057,
    "sink_uniform": 0.059, "sink_epsilon": 0.3, "variance_discrepancy": 5.8, "super_neurons": 0.0,
    "dominance_first": 3.69, "dominance_median": 3.69, "qk_cosine": 0.143,
}  # fmt: skip
BORN = {"init_seed": 0, "data": {"unigram_entropy": 6.65}}


def snapshot(step, bias, text=None, n_strangers=2, vocab_size=4096):
    known = [name for name in ("alignment_stranger", "rank_persistence_stranger") if bias.get(name) is not None]
    arrays = {name: np.full((n_strangers, 2), bias[name]) for name in known if n_strangers}
    summary = {"step": step, "vocab_size": vocab_size, "model": {"d_model": 192, "n_heads": 4}, "bias": bias}
    return Snapshot(summary | ({} if text is None else {"bias_text": text}), arrays)


def history(snapshots, metrics=None, birth=BORN):
    log = MetricsLog({"step": step, **logged} for step, logged in (metrics or {}).items())
    return RunHistory(0, "run", RunDir(Path("run")), birth, "", log, snapshots, [])


def said(*arguments, **more):
    found = {verdict.key: verdict for verdict in verdicts(history(*arguments, **more))}
    for verdict in found.values():
        assert "nan" not in verdict.sentence, verdict
        assert verdict.sentence.endswith("."), verdict
        assert len(verdict.steps) == len(verdict.values) == len(verdict.control or verdict.values)
        json.dumps(verdict.as_json(), allow_nan=False)
    return found


def answer(key, *arguments, **more):
    return said(*arguments, **more)[key]


# ---------------------------------------------------------------- what they say


def test_the_demo_in_sentences():
    losses = {0: {"val/loss": 8.827}, 320: {"val/loss": 5.019}}
    lineage = {"seedprint/z": 33.8, "seedprint/log10_p": -249.585, "seedprint/z_stranger": 1.06}
    found = said([snapshot(0, BIRTH), snapshot(320, END)], losses | {320: losses[320] | lineage})
    assert {key: verdict.sentence for key, verdict in found.items() if verdict.headline} == {
        "loss": "The model has learned: validation loss 8.83 → 5.02 nats, below the 6.65 of token frequencies.",
        "birth": "Born biased: outputs for different inputs have a mean cosine of 0.389, and the favourite token gets "
        "9.3 times its even share (KL 0.200 nats).",
        "direction": "The seed's direction survives, weakened: 0.151 against at most 0.019 for 2 strangers; 0.626 at "
        "birth.",
        "ranking": "The ranking of tokens at birth is gone: 0.013 against at most 0.022 for 2 strangers.",
        "lineage": "The lineage test finds seed 0: z 33.8, p < 10⁻²⁴⁹; strangers at most 1.1.",
        "sink": "No sink forms on random tokens: the first position gets 0.5 times its uniform share (largest head "
        "0.057, uniform 0.059). Text was not measured, where it may be larger.",
    }
    present = {"loss", "birth", "direction", "lineage", "aggregation"}
    absent = {"ranking", "sink", "neurons", "dominance", "lock"}
    assert {key for key, verdict in found.items() if verdict.tone == "present"} == present
    assert {key for key, verdict in found.items() if verdict.tone == "absent"} == absent == found.keys() - present
    assert (found["direction"].steps, found["direction"].values) == ([0, 320], [0.626, 0.151])
    assert found["sink"].control[1] == 0.059


def test_text_leads_for_sinks():
    verdict = answer("sink", [snapshot(0, END, END), snapshot(9, END | {"sink_mass": 0.127}, of_first(0.702))])
    assert verdict.sentence == (
        "A sink forms on text: the first position gets 0.702 of the attention (uniform 0.059; on random tokens 0.127). "
        "There was none at birth."
    )
    assert verdict.values == [0.03, 0.702]


def of_first(mass, most=None, uniform=0.059):
    """Scalars of a probe whose first token gets ``mass``, in the largest head ``most``."""
    return {"sink_mass": mass, "sink_mass_max": most or mass, "sink_uniform": uniform, "sink_epsilon": 0.3}


def with_controls(random, bos, text=None, text_without_bos=None, is_added=True):
    """A snapshot of a step that is not known, on random tokens and text, behind BOS and without it."""
    taken = snapshot(-1, of_first(*random), None if text is None else of_first(*text))
    taken.summary["bias_bos"] = of_first(*bos)
    taken.summary["probe_bos"] = {"token": 2, "text": "<bos>", "is_added": is_added}
    if text_without_bos is not None:
        taken.summary["bias_text_without_bos"] = of_first(*text_without_bos)
    return taken


def test_a_sink_that_hangs_on_bos():
    on_token = with_controls((0.017, 0.057), (0.477, 0.983))
    assert answer("position_or_token", [on_token]).sentence == (
        "The sink hangs on the token BOS and not on the position: the first token gets 0.477 with BOS before random "
        "tokens, 0.017 without (BOS is <bos>, uniform 0.059)."
    )
    # Random tokens alone would say that there is none.
    assert answer("sink", [on_token]).sentence == (
        "A sink stands on random tokens behind BOS: the first position gets 0.477 of the attention (largest head "
        "0.983, uniform 0.059; on random tokens alone 0.017). Text was not measured, where it may be larger."
    )
    on_text = with_controls((0.017, 0.057), (0.477, 0.983), (0.48, 0.98), (0.016, 0.05))
    assert answer("position_or_token", [on_text]).sentence == (
        "The sink hangs on the token BOS and not on the position: the first token gets 0.480 with BOS before text, "
        "0.016 without and 0.477 with BOS before random tokens, 0.017 without (BOS is <bos>, uniform 0.059)."
    )
    assert answer("sink", [on_text]).sentence.startswith("A sink stands on text:")


def test_a_sink_that_hangs_on_the_position():
    verdict = answer("position_or_token", [with_controls((0.515, 0.982), (0.444, 0.988), is_added=False)])
    assert verdict.tone == "present"
    assert verdict.sentence == (
        "The sink hangs on the position and not on BOS: the first token gets 0.444 with BOS before random tokens, "
        "0.515 without (BOS is <bos>, uniform 0.059)."
    )
    # Where no BOS is known, random first tokens are the control.
    assert answer("position_or_token", [snapshot(-1, of_first(0.515, 0.982))]).sentence == (
        "The sink hangs on the position: random first tokens get 0.515 of the attention (uniform 0.059)."
    )
    # Text was measured and has none: nothing was said of a sink that could hang on anything.
    alone = said([snapshot(-1, of_first(0.349, 0.4), of_first(0.02, 0.03))])
    assert alone["sink"].tone == "absent"
    assert alone["position_or_token"].sentence == (
        "A sink on random tokens alone: random first tokens get 0.349 of the attention (uniform 0.059)."
    )


def test_what_a_sink_hangs_on_is_not_said_beyond_its_controls():
    assert answer("position_or_token", [with_controls((0.2, 0.5), (0.6, 0.9))]).tone == "weak"
    assert answer("position_or_token", [with_controls((0.03, 0.05), (0.03, 0.05))]).tone == "absent"
    untold = answer("position_or_token", [snapshot(-1, of_first(0.03, 0.05), of_first(0.5, 0.9))])
    assert untold.tone == "unclear"
    assert untold.sentence.startswith("It cannot be told")
    assert "position_or_token" not in said([snapshot(-1, of_first(0.03, 0.05))])
    assert "position_or_token" not in said([snapshot(-1, of_first(0.03, 0.05), of_first(0.03, 0.05))])


def of_documents(step, weight, length, *, heads=True, apart=True):
    """A snapshot of text of 64 tokens in documents of one length that see themselves alone: every query behind the
    first token of its document gives that token ``weight``, by default its even share."""
    t = np.arange(64)
    since = t % length
    on_first = 1 / (since + 1) if weight is None else np.where(since == 0, 1.0, weight)
    inside = (t >= length) & (since > 0)
    on_position_0 = float(np.where(t < length, on_first, 0)[1:].mean())
    mass = float(on_first[inside].mean())
    text = of_first(on_position_0, uniform=float((1 / (t + 1))[1:].mean()))
    text |= {"sink_rate": 0.0, "document_sink_mass": mass, "document_sink_uniform": (1 / (since + 1))[inside].mean()}
    taken = snapshot(step, END, text)
    taken.summary["model"]["attention"] = {"documents": apart}
    if heads:
        taken.arrays["text.document_sink_mass"] = np.full((2, 2), mass)
    return taken


@pytest.mark.parametrize("length", [8, 16])
def test_sinks_of_documents_that_see_themselves_alone_are_judged_within_them(length):
    even = of_documents(0, None, length)
    verdict = answer("sink", [even, of_documents(9, 1.0, length)])
    uniform = np.mean([1 / (t + 1) for t in range(1, length)])
    assert verdict.tone == "present"
    assert verdict.sentence == (
        "A sink is there in every block, on text: the first token of a document gets 1.000 of the attention "
        f"(uniform {uniform:.3f}; on random tokens 0.030). There was none at birth."
    )
    assert verdict.values[1] == 1.0
    assert verdict.control == pytest.approx([uniform, uniform])
    assert answer("sink", [even, of_documents(9, None, length)]).tone == "absent"
    assert why_inactive([history([even, of_documents(9, None, length)])], "sink")
    assert why_inactive([history([even, of_documents(9, 1.0, length)])], "sink") == ""
    # Where documents see one another, position 0 is the sequence's, and leads.
    assert "the first position" in answer("sink", [of_documents(9, 1.0, length, apart=False)]).sentence


def test_a_single_head_whose_documents_are_not_recorded_is_not_ruled_out():
    found = [of_documents(0, None, 16), of_documents(9, None, 16, heads=False)]
    verdict = answer("sink", found)
    assert verdict.tone == "unclear"
    assert "the largest is not recorded" in verdict.sentence
    assert why_inactive([history(found)], "sink") == ""
    # The largest head has at least the mean.
    assert answer("sink", [found[0], of_documents(9, 1.0, 16, heads=False)]).tone == "present"


@pytest.mark.parametrize(
    ("now", "words", "tone"),
    [
        ({"alignment": 0.5, "drift": 0.9}, "persists", "present"),
        ({"alignment": -0.2, "drift": -0.9}, "turned round", "present"),
        ({"alignment": 0.04, "drift": 0.9}, "a trace", "weak"),
        ({"alignment": 0.012, "drift": 0.02}, "gone: 0.012 against at most 0.019 for 2 strangers.", "absent"),
        # More than two strangers have, and no more than chance gives: no legend may say "no more than its control".
        (
            {"alignment": 0.03, "drift": 0.02},
            "gone: 0.030 against at most 0.019 for 2 strangers; chance alone",
            "absent",
        ),
        ({"alignment": 0.151, "drift": 0.1}, "cannot be told", "unclear"),  # chance alone gives that in 192 dimensions
        ({"alignment": 0.151, "alignment_stranger": 0.16}, "strangers have as much", "unclear"),
        ({"alignment": 0.151, "alignment_stranger": None}, "no strangers", "unclear"),
        ({"alignment": None}, "not a number at step 320", "unclear"),
        ({"energy_share_chance": None}, "not known", "unclear"),
    ],
)
def test_what_is_left_of_the_direction(now, words, tone):
    verdict = answer("direction", [snapshot(0, BIRTH), snapshot(320, END | now)])
    assert words in verdict.sentence
    assert verdict.tone == tone
    if tone == "absent":
        assert legend_of_marks([verdict]) == "○ nothing that stands out from its control"


def test_few_strangers_are_counted():
    one = answer("direction", [snapshot(0, BIRTH), snapshot(1, END, n_strangers=1)])
    assert "against 0.019 for one stranger" in one.sentence


def test_a_newborn_without_direction_has_none_to_keep():
    verdict = answer("direction", [snapshot(0, BIRTH | {"inter": 0.005}), snapshot(1, END)])
    assert verdict.tone == "unclear"
    assert "hardly one (mean cosine 0.005)" in verdict.sentence


@pytest.mark.parametrize("birth", [{}, BORN | {"init_from": "a/model"}])
def test_what_a_training_started_from_is_no_birth(birth):
    found = said([snapshot(0, BIRTH), snapshot(1, END)], birth=birth)
    assert "birth" not in found
    assert found["direction"].sentence.startswith("The starting model's direction survives")
    assert "at the start is gone" in found["ranking"].sentence


def test_no_sink_says_little_of_a_model_that_has_not_learned():
    verdict = answer("sink", [snapshot(0, BIRTH), snapshot(1, END)], {0: {"val/loss": 8.0}, 1: {"val/loss": 7.0}})
    assert verdict.tone == "unclear"
    assert "has not learned either" in verdict.sentence


def test_a_mixture_is_judged_by_the_entropies_of_its_sources_in_their_shares():
    sources = {"a": {"share": 0.7, "unigram_entropy": 5.4}, "b": {"share": 0.3, "unigram_entropy": 5.0}}
    birth = {"init_seed": 0, "data": {"vocab_size": 600, "unigram_entropy": None, "sources": sources}}
    log = {0: {"val/loss": 6.75}}
    far, near, done = (answer("loss", [], log | {9: {"val/loss": loss}}, birth=birth) for loss in (6.55, 5.3, 5.2))
    assert far.control == pytest.approx([0.7 * 5.4 + 0.3 * 5.0] * 2)
    assert far.sentence == (
        "The model has not learned: validation loss 6.75 → 6.55 nats, "
        f"above the {math.log(600):.2f} of guessing evenly."
    )
    assert near.sentence.startswith("The model has learned no more than token frequencies (5.28)")
    assert done.sentence.endswith("below the 5.28 of token frequencies.")
    assert [verdict.tone for verdict in (far, near, done)] == ["absent", "absent", "present"]
    # A streamed source has none: a fall that ends above ln V is still no learning.
    sources["b"]["unigram_entropy"] = None
    far, near = (answer("loss", [], log | {9: {"val/loss": loss}}, birth=birth) for loss in (6.55, 5.3))
    assert (far.tone, far.control, near.tone) == ("absent", None, "present")
    assert near.sentence == "The model has learned: validation loss 6.75 → 5.30 nats."


def test_a_run_without_snapshots_or_with_the_birth_alone():
    assert list(said([])) == ["snapshots"]
    found = said([snapshot(0, BIRTH | END)])
    assert {"direction", "ranking"}.isdisjoint(found)
    assert found["sink"].sentence.startswith("No sink at birth")
    assert found["snapshots"].tone == "unclear"


def test_snapshots_of_a_training_that_is_not_ours():
    """No birth, no strangers, one snapshot of an unknown step."""
    bias = {name: value for name, value in END.items() if name.startswith(("sink", "dominance"))}
    assert set(said([snapshot(-1, bias)], birth={})) == {"sink", "dominance"}


def test_nothing_is_claimed_of_what_is_not_a_number():
    lost = dict.fromkeys(END | BIRTH)
    metrics = {step: {"val/loss": None, "seedprint/z": None, "seedprint/log10_p": None} for step in (0, 5)}
    found = said([snapshot(0, lost), snapshot(5, lost)], metrics)
    assert len(found) > 7
    assert {verdict.tone for verdict in found.values()} == {"unclear"}


# ---------------------------------------------------------------- never stronger than the numbers

COSINES = st.floats(-1, 1)
OR_NOTHING = st.sampled_from([0.0, 1.0, None, float("nan")])


@given(
    st.tuples(COSINES, COSINES | OR_NOTHING, st.floats(0, 1), st.floats(0, 1)),
    st.lists(st.floats(-0.3, 0.3), max_size=5),
    st.sampled_from([16, 192, 4096]),
)
def test_a_direction_survives_only_beyond_strangers_and_chance(values, strangers, width):
    now, drift, at_birth, inter = values
    bias = {"alignment": now, "drift": drift, "energy_share_chance": 1 / width}
    if strangers:
        bias["alignment_stranger"] = max(map(abs, strangers))
    born = snapshot(0, {"alignment": at_birth, "inter": inter})
    verdict = answer("direction", [born, snapshot(1, bias, n_strangers=len(strangers))])
    if verdict.tone == "unclear":
        return
    assert strangers
    assert all(math.isfinite(value) for value in values)
    # The exact distribution of a squared cosine with a random direction.
    p = stats.beta(0.5, (width - 1) / 2).sf(drift**2)
    if verdict.tone in ("present", "weak"):
        assert p < 0.0101
        assert all(abs(stranger) < abs(now) for stranger in strangers)
        assert inter >= 0.05
    else:
        assert p > 0.005
        assert any(abs(stranger) >= abs(now) for stranger in strangers) or abs(now) < 0.1 * at_birth
    # Every number of the sentence was measured.
    measured = [now, at_birth, bias["alignment_stranger"]]
    numbers = re.findall(r"-?\d*\.\d+", verdict.sentence)
    assert numbers
    for number in numbers:
        assert min(abs(float(number) - value) for value in measured) <= 0.0005 + 1e-12, verdict.sentence


@given(st.floats(-1, 1), st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=4), st.sampled_from([64, 4096, 128256]))
def test_a_ranking_survives_only_beyond_strangers_and_chance(rho, strangers, vocab_size):
    bias = {"rank_persistence": rho, "rank_persistence_stranger": max(map(abs, strangers))}
    taken = snapshot(1, bias, n_strangers=len(strangers), vocab_size=vocab_size)
    verdict = answer("ranking", [snapshot(0, BIRTH), taken])
    p = 2 * stats.norm.sf(abs(rho) * np.sqrt(vocab_size - 1))
    beyond = p <= 0.01 and all(abs(stranger) < abs(rho) for stranger in strangers)
    assert (verdict.tone in ("present", "weak")) == beyond or p == pytest.approx(0.01, rel=0.01)
    if "persists" in verdict.sentence:
        assert rho >= 0.5
    if "gone" in verdict.sentence:
        assert p > 0.009


HEADS = st.lists(st.floats(0, 1), min_size=1, max_size=4)


@given(HEADS, st.sampled_from([8, 64, 2048]), st.booleans(), st.sampled_from([0.1, 0.3, 0.6]))
def test_a_sink_needs_a_head_beyond_the_uniform_level_and_epsilon(heads, length, on_text, epsilon):
    uniform = float(np.mean([1 / (t + 1) for t in range(1, length)]))
    bias = of_first(float(np.mean(heads)), max(heads), uniform) | {"sink_epsilon": epsilon}
    flat = bias | {"sink_mass": uniform, "sink_mass_max": uniform}
    text = (flat, bias) if on_text else (None, None)
    verdict = answer("sink", [snapshot(0, flat, text[0]), snapshot(1, flat if on_text else bias, text[1])])
    assert (verdict.tone == "present") == (max(heads) / uniform >= 3 and max(heads) > epsilon)
    if verdict.tone == "absent":
        assert all(head < 2 * uniform for head in heads)
    assert ("random tokens:" in verdict.sentence) != on_text
    assert ("Text was not measured" in verdict.sentence) != on_text


@given(st.none() | st.floats(-5, 200), st.floats(-4000, 0), st.none() | st.floats(-4, 6), st.sampled_from([0, 64]))
def test_lineage_is_found_only_beyond_strangers(z, log10_p, stranger, step):
    figures = {"seedprint/z": z, "seedprint/log10_p": log10_p, "seedprint/z_stranger": stranger}
    verdict = answer("lineage", [], {step: figures})
    if verdict.tone == "present":
        assert log10_p < -2
        assert stranger is None or z - stranger >= 3.29
        assert "finds seed 0" in verdict.sentence
    assert ("no stranger" in verdict.sentence) == (stranger is None)


@pytest.mark.parametrize(
    ("weights", "stranger", "shown"),
    [(0.45, 0.002, True), (0.45, None, True), (0.05, 0.002, False), (0.3, -0.4, False), (None, None, False)],
)
def test_weights_show_a_birth_that_hidden_states_have_forgotten(weights, stranger, shown):
    figures = {"seedprint/z": -1.1, "seedprint/log10_p": -0.1, "seedprint/z_stranger": 0.9}
    figures |= {"seedprint/weights": weights, "seedprint/weights_stranger": stranger}
    verdict = answer("lineage", [], {5: figures})
    assert "does not find seed 0" in verdict.sentence
    assert ("weights still show" in verdict.sentence) == (verdict.tone == "present") == shown
    assert ("0.45" in verdict.sentence or ".45" in verdict.sentence) == shown


@given(st.floats(-5000, 0))
def test_a_chance_in_a_sentence_is_never_smaller_than_it_is(log10_p):
    text = p_in_prose(log10_p)
    plain = in_ascii(text)
    plain.encode("ascii")
    if "<" in text:
        exponent = int(plain.removeprefix("p < 1e"))
        assert log10_p < exponent <= log10_p + 1
    else:
        assert float(plain.removeprefix("p ")) >= 10**log10_p > 0.0009


def test_every_threshold_has_a_source():
    assert all(threshold.meaning.endswith(".") and threshold.source for threshold in THRESHOLDS.values())


def test_folding_has_no_numbers_beside_the_table():
    """docs/quantities.md is made of the table."""
    tree = ast.parse(inspect.getsource(inactive_sections))
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {value for value in constants if type(value) in (int, float)} <= {0, 1}


@pytest.mark.parametrize(
    ("section", "name", "scalars"),
    [
        ("sink", "no_sink", lambda at: {"sink_mass_max": at * 0.05, "sink_uniform": 0.05}),
        ("sink", "no_sink_rate", lambda at: {"sink_mass_max": 0.05, "sink_uniform": 0.05, "sink_rate": at}),
        ("dominance", "alike", lambda at: {"dominance_first": at, "dominance_median": 1.0}),
        ("aggregation", "alike", lambda at: {"variance_discrepancy": at}),
        ("aggregation", "alike", lambda at: {"variance_discrepancy": 1 / at}),
        ("lock", "no_lock", lambda at: {"qk_cosine": at * 48**-0.5}),
        ("contraction", "contraction", lambda at: {"inter": at, "intra": 0.01}),
    ],
)
def test_a_section_is_folded_up_to_its_threshold(section, name, scalars):
    limit = THRESHOLDS[name].value
    runs = [history([snapshot(0, BIRTH | scalars(factor * limit))]) for factor in (0.99, 1.01)]
    assert [why_inactive([run], section) != "" for run in runs] == [True, False]


def test_links_of_the_chain_are_judged_on_random_tokens():
    text = END | {"super_neurons": 26.0, "dominance_first": 40.0, "qk_cosine": 0.9, "variance_discrepancy": 0.0}
    found = said([snapshot(0, BIRTH), snapshot(320, END | {"super_neurons": 1.0}, text)])
    assert found["neurons"].sentence == "1 super neuron fires at the first position on random tokens."
    assert {found[key].tone for key in ("dominance", "lock")} == {"absent"}
    assert found["aggregation"].tone == "present"
