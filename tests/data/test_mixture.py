"""Several sources in asked shares: every sample once, in order, whoever asks."""

import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from birthmark.data.batches import FixedWindows, ShardedTokens, TokenWindows
from birthmark.data.config import DataConfig, SourceConfig, WeightChange
from birthmark.data.mixture import InTurn, Mixture, Proportions, SourceOrder, _spread
from birthmark.data.prepare import prepare
from birthmark.data.token_file_formats import TokenFile
from birthmark.data.token_files import SpanTokens
from birthmark.errors import RunError, UsageError

# Neighbours of very different sizes are what a tree of halves does worst with.
WEIGHTS = st.lists(st.sampled_from([0.0, 1e-7, 0.01, 0.5, 1.0]) | st.floats(1e-3, 1e3), min_size=1, max_size=8)


@pytest.mark.heavy
@settings(max_examples=25)
@given(weights=WEIGHTS, far=st.integers(0, 10**10))
def test_each_source_has_its_share_at_every_thousand_and_its_samples_in_order(weights, far):
    assume(any(weights))
    proportions = Proportions(weights)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    source_N, number_N = proportions.places(np.arange(5000))
    for i, share in enumerate(shares):
        assert number_N[source_N == i].tolist() == list(range(int((source_N == i).sum())))
        for n in range(1000, 5001, 1000):
            assert abs(int((source_N[:n] == i).sum()) - n * share) <= n / 1000
    # Far in, over the border of a block: as many before as the shares say, and on from there.
    before = proportions.taken(far).tolist()
    assert sum(before) == far
    assert all(abs(count - far * share) <= 2.7 for count, share in zip(before, shares, strict=True))
    source_N, number_N = proportions.places(np.arange(far, far + 300))
    for i, count in enumerate(before):
        assert number_N[source_N == i].tolist() == list(range(count, count + int((source_N == i).sum())))
    assert proportions.taken(far + 300).tolist() == (before + np.bincount(source_N, minlength=len(weights))).tolist()


@pytest.mark.parametrize("n_sources", [2, 3, 8])
def test_no_place_of_the_first_block_is_a_sample_off(n_sources):
    weights = np.random.default_rng(n_sources).random(n_sources) ** 3
    source_N, _ = Proportions(weights.tolist()).places(np.arange(2000))
    counts_NS = np.cumsum(source_N[:, None] == np.arange(n_sources), axis=0)
    assert np.abs(counts_NS - np.arange(1, 2001)[:, None] * weights / weights.sum()).max() < 1


def test_samples_in_any_order_are_those_in_order():
    proportions = Proportions([5, 2, 0, 1])
    source_N, number_N = proportions.places(np.arange(20_000))
    shuffled = np.random.default_rng(0).permutation(20_000)
    found = proportions.places(shuffled)
    assert np.array_equal(found[0], source_N[shuffled])
    assert np.array_equal(found[1], number_N[shuffled])


@pytest.mark.parametrize("counts", [(5,), (0, 3, 4), (1, 1, 30), (7, 5, 5, 2), (4, 4, 4, 4, 4), (2, 0, 11, 3, 1, 1)])
def test_the_order_within_a_block_is_the_rules(counts):
    total, given = sum(counts), [i for i, count in enumerate(counts) if count]
    margin, taken = Fraction(1, max(2 * len(given) - 2, 1)), [0] * len(counts)
    for k, source, number in zip(range(total), *(x.tolist() for x in _spread(counts)), strict=True):
        behind = [
            i for i in given if Fraction((k + 1) * counts[i], total) - taken[i] >= margin and taken[i] < counts[i]
        ]
        # The last place at which each must have come.
        last = {i: (taken[i] + 1 - margin) * total // counts[i] for i in behind}
        assert source == min(behind, key=lambda i: (last[i], i))
        assert number == taken[source]
        taken[source] += 1


# ---------------------------------------------------------------- several sources in asked shares
# Every sample once, in order, whoever asks.

SEQ_LEN = 4


@pytest.fixture
def sources(tmp_path):
    """Three of 50, 20 and 7 windows; a token says its source and its place there."""
    found = {}
    for number, (name, n_windows) in enumerate({"web": 50, "code": 20, "poems": 7}.items()):
        file = tmp_path / f"{name}.bin"
        (10_000 * number + np.arange(n_windows * SEQ_LEN + 1)).astype("<u2").tofile(file)
        found[name] = TokenWindows(ShardedTokens([file], "<u2"), SEQ_LEN, 65_536, data_seed=3)
    return found


def test_shares_hold_at_every_thousand_samples_of_a_stage(sources):
    stages = {0: {"web": 0.7, "code": 0.25, "poems": 0.05}, 4321: {"code": 1, "poems": 2}, 9000: {"web": 1.0}}
    changes = [(first, weights) for first, weights in stages.items() if first]
    order = SourceOrder(list(sources), stages[0], changes)
    mixture = Mixture(sources, order)
    source_N, number_N = mixture.places(np.arange(12_000))
    for (first, weights), last in zip(stages.items(), [4321, 9000, 12_000], strict=True):
        asked = np.array([weights.get(name, 0) for name in sources]) / sum(weights.values())
        for n in range(1000, last - first + 1, 1000):
            shares = np.bincount(source_N[first : first + n], minlength=3) / n
            np.testing.assert_allclose(shares, asked, atol=1e-3)
    # Over all stages each source is read in its order, none of its samples twice or never.
    for i in range(3):
        assert number_N[source_N == i].tolist() == list(range(int((source_N == i).sum())))
    for n in (0, 4320, 4321, 9000, 12_000):
        assert list(order.taken(n).values()) == np.bincount(source_N[:n], minlength=3).tolist()
    assert order.shares == pytest.approx(stages[0])
    assert mixture.epochs(12_000)["poems"] == int((source_N == 2).sum()) / 7


def test_a_sample_is_what_its_source_gives(sources):
    mixture = Mixture(sources, SourceOrder(list(sources), {"web": 5, "code": 2, "poems": 1}))
    read, whole = {name: [] for name in sources}, mixture.batch(0, 400).tolist()
    assert mixture.batch(137, 50).tolist() == whole[137:187]
    for sample in whole:
        read[list(sources)[sample[0] // 10_000]].append(sample)
    for name, source in sources.items():
        assert read[name] == source.batch(0, len(read[name])).tolist()
        # Every window of an epoch once, then all again in another order.
        n = source.n_samples
        epochs = [sorted(read[name][i : i + n]) for i in range(0, len(read[name]) - n + 1, n)]
        assert epochs
        assert all(epoch == epochs[0] for epoch in epochs)
        assert read[name][:n] != read[name][n : 2 * n] or len(read[name]) < 2 * n
    assert mixture.epochs(400)["poems"] == len(read["poems"]) / 7


def test_a_token_too_large_is_told_of_its_source_and_not_of_others(sources, tmp_path):
    """Shards hold any token; a file of others is read for a vocabulary, also by a worker that maps it anew."""
    file = tmp_path / "theirs.bin"
    np.arange(5 * SEQ_LEN + 1).astype("<u2").tofile(file)
    whole = np.array([[0, 0, 5 * SEQ_LEN + 1]])

    def mixture(vocab_size):
        tokens = SpanTokens([TokenFile("theirs", file, "<u2", 5 * SEQ_LEN + 1)], whole, vocab_size)
        mixed = sources | {"theirs": TokenWindows(tokens, SEQ_LEN, vocab_size, data_seed=3)}
        return pickle.loads(pickle.dumps(Mixture(mixed, SourceOrder(list(mixed), dict.fromkeys(mixed, 1)))))

    allowed = mixture(5 * SEQ_LEN + 1)
    batch = allowed.batch(0, 80)  # all four, some of their windows twice
    assert batch.max() > allowed.sources["theirs"].vocab_size
    for row, source, number in zip(batch, *allowed.places(np.arange(80)), strict=True):
        assert row.tolist() == list(allowed.sources.values())[source].samples(np.array([number]))[0].tolist()
    with pytest.raises(RunError, match=r"theirs\.bin: holds token 20, the vocabulary has 20"):
        mixture(5 * SEQ_LEN).batch(0, 80)


def test_validation_takes_turns(sources):
    fixed = {name: FixedWindows(source.tokens, SEQ_LEN, 65_536) for name, source in sources.items()}
    assert (InTurn(fixed).batch(0, 30)[:, 0] // 10_000).tolist() == [0, 1, 2] * 10
    assert InTurn(fixed).batch(1, 30).tolist() == InTurn(fixed).batch(0, 31)[1:].tolist()


@pytest.fixture
def config(tmp_path):
    for name, word, n in (("prose", "alpha beta gamma ", 30), ("code", "def f ( x ) : ", 12)):
        (tmp_path / name).mkdir()
        for i in range(n):
            (tmp_path / name / f"{i:02d}.txt").write_text(f"{i} " + word * 40)
    sources = [SourceConfig(str(tmp_path / "prose"), 3.0), SourceConfig(str(tmp_path / "code"), 1.0)]
    return DataConfig(sources=sources, val_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def test_from_sources_to_batches(config):
    data = prepare(config, vocab_size=300, seq_len=16)
    texts = ["".join(data.token_texts(row)) for row in data.train.batch(0, 200).tolist()]
    assert sum("alpha" in text or "gamma" in text for text in texts) == 150
    assert data.record["sources"]["code"]["share"] == 0.25
    raw = Tokenizer.from_file(str(data.tokenizer_path))
    bytes_per_token = 0.0
    for source, share in zip(config.sources, (0.75, 0.25), strict=True):
        ids = {True: [], False: []}
        held_out = 0
        for file in sorted(Path(source.path).iterdir()):
            digest = xxhash.xxh3_64(file.read_bytes(), seed=int.from_bytes(b"birthmrk", "little")).intdigest()
            is_val = digest * 2.0**-64 < 0.2
            ids[is_val] += [*raw.encode(file.read_text()).ids, 0]
            held_out += is_val * file.stat().st_size
        tokens = data.train.sources[source.label].tokens
        assert tokens.read(np.array([0]), len(tokens))[0].tolist() == ids[False]
        bytes_per_token += share * held_out / len(ids[True])
    assert data.bytes_per_token == pytest.approx(bytes_per_token)


def test_without_weights_sizes_decide(config):
    sources = [replace(source, weight=None) for source in config.sources]
    data = prepare(replace(config, sources=sources), vocab_size=300, seq_len=16)
    tokens = {name: facts["tokens"]["train"] for name, facts in data.record["sources"].items()}
    assert data.mixture.shares == pytest.approx({name: n / sum(tokens.values()) for name, n in tokens.items()})


def source(path, weight=1.0, name=""):
    return SourceConfig(path, weight, name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": [source("stdlib", -1.0)]}, "data.sources: weight -1.0 of 'stdlib' is not a number of at least 0"),
        ({"sources": [source("stdlib", 0.0), source("readmes")]}, "data.sources: weight 0 of 'stdlib', which is never"),
        ({"sources": [source("stdlib", 0.0)]}, "data.sources: no weight is positive at the start"),
        ({"sources": [source("stdlib", float("nan"))]}, "data.sources: weight nan of 'stdlib'"),
        ({"sources": [source("stdlib"), source("readmes", None)]}, "data.sources: 'readmes' has no weight"),
        ({"sources": [source("stdlib"), source("readmes", name="stdlib")]}, "data.sources: 2 are called 'stdlib'"),
        ({"sources": [source("stdlib", name="a/b")]}, "data.sources: 'a/b' is no name"),
        ({"sources": [source("backcopy")]}, "data.sources: 'backcopy' is backcopy"),
        ({"sources": [source("/no/where")]}, "data.sources, 'where': '/no/where' does not exist"),
        ({"sources": [source("stdlib")], "path": "readmes"}, "data.path: 'readmes' is not read beside data.sources"),
        ({"epochs": 0.0}, "data.epochs: 0.0 is not a positive number"),
    ],
)
def test_what_cannot_be_mixed_is_one_line(fields, message):
    problems = DataConfig(**fields).problems()
    assert any(problem.startswith(message) and "\n" not in problem for problem in problems), problems


TWO = [source("stdlib"), source("readmes", 0.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(0, {"readmes": 1.0})], "data.schedule[0].step: 0 is not above 0"),
        ([(5, {"readmes": 1.0}), (5, {"stdlib": 1.0})], "data.schedule[1].step: 5 is not above 5"),
        ([(5, {"readmes": 1.0, "web": 1.0})], "data.schedule[0].weights: 'web' is none of data.sources; they are"),
        ([(5, {"readmes": -1.0})], "data.schedule[0].weights: -1.0 of 'readmes' is not a number of at least 0"),
        ([(5, {"readmes": float("nan")})], "data.schedule[0].weights: nan of 'readmes'"),
        ([(5, {"readmes": 1.0}), (9, {"stdlib": 0.0})], "data.schedule[1].weights: none is positive"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(changes, message):
    schedule = [WeightChange(step, weights) for step, weights in changes]
    (problem,) = DataConfig(sources=TWO, schedule=schedule).problems()
    assert problem.startswith(message)
    assert "\n" not in problem


def test_a_schedule_may_bring_a_source_in_and_needs_sources():
    schedule = [WeightChange(5, {"readmes": 1.0})]
    assert DataConfig(sources=TWO, schedule=schedule).problems() == []
    (problem,) = DataConfig(schedule=schedule).problems()
    assert problem.startswith("data.schedule: changes the weights of data.sources, and there are none")


def test_a_message_names_the_source(config, tmp_path):
    (tmp_path / "empty").mkdir()
    sources = [*config.sources, SourceConfig(str(tmp_path / "empty"), 1.0)]
    with pytest.raises(UsageError, match=r"^data\.sources, 'empty': .* holds no"):
        prepare(replace(config, sources=sources), vocab_size=300, seq_len=16)
