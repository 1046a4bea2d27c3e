"""Sentences that name blocks, on snapshots with planted patterns: what is true of them is known by construction."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.findings.massive_channel import massive_pairs, rises
from birthmark.findings.quantities_by_block import Profile, blocks_in_words, stretches
from birthmark.findings.run_history import BIRTH, PRETRAINED, RunHistory
from birthmark.measure.metrics_log import MetricsLog
from birthmark.measure.records import RunDir, Snapshot
from birthmark.report.block_table import print_snapshot
from birthmark.report.verdicts import snapshot_figures, snapshot_verdicts, verdicts

L, H, T, D, UNIFORM = 8, 3, 16, 64, 0.16


def planted(*, sinks=(), step=-1, **arrays):
    """A snapshot of 8 blocks in which the largest heads of ``sinks`` (from 1) park on position 0."""
    mass = np.full((L, H), UNIFORM)
    mass[[block - 1 for block in sinks], 1] = 0.9
    dominance = np.full((L + 1, T), 5.0)
    held = {
        "sink_mass": mass, "variance_discrepancy": np.ones(L), "dominance": dominance,
        "effective_rank": np.full(L + 1, 40.0), "qk_cosine": np.full((L, H), 0.25), "super_neurons": np.zeros(L),
    } | arrays  # fmt: skip
    bias = {
        "sink_mass": float(np.nanmean(held["sink_mass"])), "sink_mass_max": float(np.nanmax(held["sink_mass"])),
        "sink_uniform": UNIFORM, "sink_epsilon": 0.3, "super_neurons": float(np.nansum(held["super_neurons"])),
        "variance_discrepancy": float(np.nanmean(held["variance_discrepancy"])), "dominance_first": 5.0,
        "dominance_median": 5.0, "qk_cosine": float(np.nanmean(held["qk_cosine"])), "kl_uniform": 0.01,
        "effective_rank": float(held["effective_rank"][-1]), "preference_ratio": 1.5,
    }  # fmt: skip
    model = {"d_model": D, "d_head": 16, "n_heads": H}
    probe = {"n_sequences": 4, "seq_len": T, "dtype": "float32"}
    summary = {"step": step, "vocab_size": 50, "model": model, "probe": probe, "bias": bias, "seconds": 1.0}
    return Snapshot(summary | {"top_tokens": [], "n_layers": L, "n_heads": H}, held)


def said(snapshot):
    return {verdict.key: verdict for verdict in snapshot_verdicts(RunHistory.of_snapshot(snapshot))}


def by_block(values):
    """``{block: value}`` as an array; elsewhere 1."""
    array = np.ones(L)
    for block, value in values.items():
        array[block - 1] = value
    return array


# ---------------------------------------------------------------- the sink


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        (range(1, 9), ["is there in every block"]),
        (range(4, 9), ["forms at block 4,"]),
        ((3, 4, 7, 8), ["forms at block 3", "vanishes after block 4", "forms again at block 7"]),
        ((1, 2), ["is there from block 1 on", "vanishes after block 2"]),
        ((6,), ["forms at block 6", "vanishes after block 6"]),
        ((1, 3, 5, 7, 8), ["is there from block 1 on"]),
    ],
)
def test_a_sink_is_said_to_form_and_vanish_where_it_does(sinks, words):
    verdict = said(planted(sinks=sinks))["sink"]
    assert verdict.tone == "present"
    for part in words:
        assert part in verdict.sentence
    for part in ("forms", "vanishes"):
        assert verdict.sentence.count(part) == sum(word.count(part) for word in words) or len(words) == 1
    # The share is that of the blocks with a sink: one head of three has .9, the others the uniform share.
    share = f"{(0.9 + 2 * UNIFORM) / 3:.3f}"
    assert share in verdict.sentence or "times its uniform share" in verdict.sentence
    assert "largest head 0.900, uniform 0.160" in verdict.sentence
    without = sorted(set(range(1, L + 1)) - set(sinks))
    assert (f"{blocks_in_words(without)[1:]} ha" in verdict.sentence) == bool(without)


def test_blocks_that_show_no_weights_neither_have_a_sink_nor_end_one():
    mass = np.full((L, H), UNIFORM)
    mass[2:] = 0.9
    mass[4] = np.nan
    verdict = said(planted(sink_mass=mass))["sink"]
    assert "A sink forms at block 3, on" in verdict.sentence
    assert "vanishes" not in verdict.sentence
    assert "Blocks 1 and 2 have none" in verdict.sentence


def test_a_stretch_lasts_while_a_head_is_drawn_there():
    mass = np.full((L, H), UNIFORM)
    mass[[1, 2, 4], 0] = 0.9
    mass[[0, 3, 6], 0] = 0.4  # 2.5 times the uniform share: no sink, and no end of one
    sentence = said(planted(sink_mass=mass))["sink"].sentence
    assert "forms at block 2 and vanishes after block 5" in sentence
    assert "Blocks 6 and 8 have none" in sentence


def test_the_chain_is_judged_on_text_where_only_text_has_a_sink():
    """As of a model whose sink hangs on BOS: on random tokens there is neither a sink nor what leads to it."""
    random, text = planted(), massive(sink_mass=np.full((L, H), 0.9))
    of_text = {f"text.{name}": array for name, array in text.arrays.items()}
    found = said(Snapshot(random.summary | {"bias_text": text.bias}, random.arrays | of_text))
    assert "Unit 11 of block 5 writes channel 7" in found["neurons"].sentence
    for key in ("sink", "neurons", "dominance", "lock", "rank"):
        assert "on text" in found[key].sentence, key
    assert found["dominance"].tone == "present"
    assert found["aggregation"].sentence.startswith("On random tokens, which have no sink, the variance")
    # With a sink on both, random tokens decide.
    with_sink = planted(sinks=(2,))
    found = said(Snapshot(with_sink.summary | {"bias_text": text.bias}, with_sink.arrays | of_text))
    assert "on random tokens" in found["dominance"].sentence
    assert found["dominance"].tone == "absent"


def test_a_sink_of_now_is_set_against_the_start():
    def run(before, birth):
        first, last = planted(sinks=before, step=0), planted(sinks=(4, 5), step=9)
        history = RunHistory(0, "run", RunDir(Path("run")), birth, "", MetricsLog(), [first, last], [])
        return {verdict.key: verdict.sentence for verdict in verdicts(history)}["sink"]

    assert "There was none at birth." in run((), {"init_seed": 0})
    assert "It was there at the start." in run((3,), {"init_from": "a/model"})


# ---------------------------------------------------------------- the links before it


def test_the_variance_is_judged_before_the_sink_forms():
    """Parked heads leave position 0 no variance: the mean over blocks says that nothing stands out."""
    ratios = by_block({1: 14.3, 2: 3.9} | dict.fromkeys(range(3, 9), 0.01))
    assert ratios.mean() > 2
    ratios[0] = 9.0
    assert ratios.mean() < 2
    verdict = said(planted(sinks=range(3, 9), variance_discrepancy=ratios))["aggregation"]
    assert verdict.tone == "present"
    assert "in blocks 1 and 2, before the sink forms: σ²(0) is up to 9.00 times" in verdict.sentence
    assert "(block 1); 1 is equal variance. From block 3 on, with the sink, it is 0.01." in verdict.sentence
    # Behind the sink a block may stand out as much as it likes.
    late = by_block({8: 30.0})
    assert said(planted(sinks=range(3, 9), variance_discrepancy=late))["aggregation"].tone == "absent"
    assert "in block 8" in said(planted(variance_discrepancy=late))["aggregation"].sentence
    constant = said(planted(variance_discrepancy=np.zeros(L)))["aggregation"]
    assert constant.tone == "unclear"
    assert "same token" in constant.sentence


def test_the_lowest_rank_is_named_where_it_is():
    rank = np.array([40.0, 38, 36, 10, 9, 12, 30, 35, 33])
    verdict = said(planted(effective_rank=rank))["rank"]
    assert verdict.tone == "present"
    for part in ("in blocks 3–5", "lowest after block 4, 9.0 of 64", "40.0 in the embeddings", "33.0 after the last"):
        assert part in verdict.sentence
    figure = next(figure for figure in snapshot_figures(planted(effective_rank=rank)) if figure[0] == "Effective rank")
    assert figure == ("Effective rank", "9.00", "lowest, after block 4; last block 33.00")
    flat = said(planted())["rank"]
    assert flat.tone == "absent"
    assert "in no block" in flat.sentence


def test_dominance_and_lock_name_their_blocks():
    dominance = np.full((L + 1, T), 5.0)
    dominance[3:6, 0] = [11.0, 50.0, 12.0]
    cosine = np.full((L, H), 0.25)
    cosine[6] = 0.8
    found = said(planted(dominance=dominance, qk_cosine=cosine))
    assert "in blocks 3–5: max over mean is up to 50.0 in block 4, 5.0 at the median" in found["dominance"].sentence
    assert "in block 7: " in found["lock"].sentence
    assert "up to 0.800 (block 7), chance 0.250" in found["lock"].sentence
    # Over all blocks the mean is below the threshold.
    assert cosine.mean() < 0.5


def test_a_gradient_at_the_embeddings_alone_is_no_gradient_sink():
    def gradient(first, blocks):
        snapshot = planted(gradient_sink=np.array([first, *blocks]))
        return said(snapshot)["gradient"]

    alone = gradient(4.77, [0.3] * L)
    assert alone.tone == "absent"
    assert "4.77 in the embeddings" in alone.sentence
    assert "at most 0.30 (block 1)" in alone.sentence
    there = gradient(1.0, [1.0, 1.0, 5.0, 6.0, 1.0, 1.0, 1.0, 1.0])
    assert there.tone == "present"
    assert "in blocks 3 and 4: up to 6.00 (block 4)" in there.sentence
    assert "gradient" not in said(planted())


# ---------------------------------------------------------------- the massive channel and its writers


def massive(**changed):
    """Channel 7 is massive at position 0 in blocks 2 to 3 (90) and 5 to 7 (5,000), and at position 1 smaller; units 11
    and 12 of block 5 write it, unit 13 of block 2 does."""
    size = [0.5, 0.5, 90.0, 91.0, 0.5, 5000.0, 5010.0, 4900.0, 0.5]
    lists = {
        "massive_value": np.array([[max(v, 1.0), max(v / 4, 0.9), 0.1] for v in size]),
        "massive_position": np.array([[0 if v > 1 else 9, 1, 3] for v in size]),
        "massive_channel": np.array([[7, 7, 2]] * (L + 1)),
    }
    dominance = np.full((L + 1, T), 5.0)
    dominance[np.array(size) > 1, 0] = 40.0
    units = {
        "neuron_index": np.tile([11, 12, 13, 14], (L, 1)), "neuron_is_super": np.zeros((L, 4), dtype=bool),
        "neuron_down_dimension": np.full((L, 4), 3), "neuron_first": np.full((L, 4), 1.0),
        "neuron_others": np.full((L, 4), 0.1), "neuron_down_sparsity": np.full((L, 4), 4.0),
    }  # fmt: skip
    units["neuron_is_super"][4] = True
    units["neuron_down_dimension"][4] = [7, 7, 3, 7]
    units["neuron_first"][4] = [2900.0, 900.0, 5000.0, 1.0]
    units["neuron_down_sparsity"][4] = [60.0, 50.0, 60.0, 20.0]
    units["neuron_is_super"][1] = [False, False, True, False]
    units["neuron_down_dimension"][1] = [7, 7, 7, 7]
    units["neuron_first"][1] = [80.0, 1.0, 30.0, 1.0]
    counts = np.array([0, 1, 0, 0, 4, 0, 0, 0])
    return planted(super_neurons=counts, dominance=dominance, **lists | units | changed)


def test_the_writers_of_the_massive_channel_are_named_and_no_other_unit():
    largest, found = rises(massive())
    assert (largest.position, largest.channel, largest.value, largest.block) == (0, 7, 5010.0, 6)
    assert [(rise.block, [writer.unit for writer in rise.writers]) for rise in found] == [(5, [11, 12]), (2, [13])]
    sentence = said(massive())["neurons"].sentence
    assert sentence.startswith("Unit 11 of block 5 writes channel 7, in which the first position's state reaches 5,010")
    assert "mean |activation| is 2,900 there and 0.10 elsewhere" in sentence
    assert "Unit 12 of that block writes it too." in sentence
    assert "In block 2 unit 13 writes it, up to 91.0." in sentence
    assert "14" not in re.findall(r"\d+", sentence)


def test_every_pair_is_listed_once_and_other_positions_are_not_crowded_out():
    pairs = massive_pairs(massive())
    assert len({(pair.position, pair.channel) for pair in pairs}) == len(pairs)
    assert [(pair.position, pair.channel, pair.value) for pair in pairs[:2]] == [(0, 7, 5010.0), (1, 7, 1252.5)]
    assert pairs[0].blocks == (2, 3, 5, 6, 7)
    assert "next is position 1 with 1,252" in said(massive())["dominance"].sentence


def test_a_channel_that_no_listed_unit_writes_is_said_to_have_none():
    without = massive(neuron_down_dimension=np.full((L, 4), 3))
    assert "none of those listed writes its channel 7" in said(without)["neurons"].sentence
    # Blocks with experts show no unit.
    unseen = massive(neuron_index=np.full((L, 4), np.nan), neuron_down_dimension=np.full((L, 4), np.nan))
    assert "none of those listed" in said(unseen)["neurons"].sentence


# ---------------------------------------------------------------- in words


def test_a_snapshot_begins_with_its_sentences_in_the_terminal(capsys):
    from rich.console import Console

    print_snapshot(massive(sink_mass=np.full((L, H), 0.9)), Console(width=100))
    text = capsys.readouterr().out
    assert text.index("A sink is there in every block") < text.index("Unit 11 of block 5") < text.index("──")


def test_words_of_a_birth_are_those_of_a_model_that_training_started_from():
    lede = "The seed direction is the mean direction in which random inputs leave the last block at birth."
    assert BIRTH.says(lede) == lede
    found = PRETRAINED.says(lede)
    assert "birth" not in found
    assert "seed" not in found
    assert found.endswith("leave the last block at the start.")


@given(st.sets(st.integers(1, 40), min_size=1))
def test_blocks_in_words_name_each_block_once_and_no_other(blocks):
    words = blocks_in_words(sorted(blocks))
    if match := re.fullmatch(r"(\d+) blocks from (\d+) to (\d+)", words):
        assert [int(n) for n in match.groups()] == [len(blocks), min(blocks), max(blocks)]
        assert len(stretches(sorted(blocks))) > 4
        return
    named = set()
    for start, end in re.findall(r"(\d+)(?:–(\d+))?", words):
        named |= set(range(int(start), int(end or start) + 1))
    assert named == blocks


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_a_story_is_true_of_every_block(mask, data):
    """Read back: a block has it if and only if it forms at or before it and has not vanished since."""
    mask = np.array(mask)
    if not mask.any():
        return
    profile = Profile(np.where(mask, 2.0, 1.0), np.ones(len(mask)))
    story = profile.story(mask)
    if "forms" not in story and "vanishes" not in story:
        assert mask.all() or len(stretches(np.flatnonzero(mask))) > 4 or story == "is there from block 1 on"
        return
    events = re.findall(r"(from|at|after) block (\d+)", story)
    found, state = np.zeros(len(mask), dtype=bool), False
    for block in range(1, len(mask) + 1):
        state = state or any(word != "after" and int(n) == block for word, n in events)
        found[block - 1] = state
        state = state and not any(word == "after" and int(n) == block for word, n in events)
    assert (found == mask).all()


@pytest.mark.slow
def test_the_chain_of_a_real_model(smollm2, tmp_path):
    """SmolLM2-135M: unit 1229 of block 12 writes channel 507, heads park from block 3 on and again from block 13 on."""
    from transformers import AutoModelForCausalLM

    from birthmark.data.probes import random_probe
    from birthmark.measure.recorder import SnapshotRecorder

    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype="float32")
    probe = random_probe(model.config.vocab_size, 16, 128, 0)
    snapshot = SnapshotRecorder(tmp_path, probes={"random": probe}).take(model, 1)
    found = said(snapshot)
    assert re.search(r"vanishes after block 1[01] and forms again at block 13", found["sink"].sentence)
    assert "12 have none" in found["sink"].sentence
    assert found["neurons"].sentence.startswith("Unit 1229 of block 12 writes channel 507")
    assert "in blocks 1 and 2, before the sink forms" in found["aggregation"].sentence
    assert re.search(r"in blocks 12–\d\d: .* after block 1[2-6], \d\d\.\d of 576", found["rank"].sentence)
    largest, *others = massive_pairs(snapshot)
    assert (largest.position, largest.channel, largest.block) == (0, 507, 12)
    assert next(pair for pair in others if pair.channel == 507).position == 1
