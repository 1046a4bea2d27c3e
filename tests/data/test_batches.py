""""""

import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from birthmark.data import batches as nearby
from birthmark.data.batch_sizes import BatchRamp, BatchSizes
from birthmark.data.batches import FixedWindows, ShardedTokens, TokenWindows, permuted
from birthmark.data.process_batches import MicroBatches
from birthmark.errors import UsageError


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 65537])
def test_is_a_bijection(size):
    assert np.array_equal(np.sort(permuted(np.arange(size), size, "test", 7)), np.arange(size))


@given(st.integers(1, 10**12), st.integers(0, 2**63), st.data())
def test_any_part_can_be_computed_alone(size, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permuted(positions, size, seed)
    alone = [int(permuted(np.array([position]), size, seed)[0]) for position in positions]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == len(set(positions.tolist()))
    assert together.min() >= 0
    assert together.max() < size


def test_keys_decide_the_order():
    orders = {permuted(np.arange(50), 50, *key).tobytes() for key in [(0, 0), (0, 1), (1, 0), (10, 0), (1, "00")]}
    assert len(orders) == 5
    assert np.array_equal(permuted(np.arange(50), 50, 3), permuted(np.arange(50), 50, 3))


@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 5, 12, 30])
def test_every_place_is_as_likely_as_another(size):
    """Over many keys each element should land everywhere equally often.

    Chi-square with (size − 1)² degrees of freedom, k: its sd is √(2k); five of them is past chance.
    """
    n_keys = 2000
    counts = np.zeros((size, size))
    for key in range(n_keys):
        counts[np.arange(size), permuted(np.arange(size), size, "uniform", key)] += 1
    expected = n_keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_part():
    """A shuffled order has no memory of the old one: rank correlation of consecutive places is chance (sd 1/√n)."""
    order = permuted(np.arange(10_000), 10_000, "serial", 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(10_000)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 5 / np.sqrt(10_000)


# ----------------------------------------------------------------


def test_tokens_are_read_across_shards(make_tokens):
    tokens = make_tokens(7, 0, 1, 20, 3)
    assert len(tokens) == 31
    starts = np.array([0, 5, 6, 7, 8, 20, 27, 3])
    assert np.array_equal(tokens.read(starts, 4), starts[:, None] + np.arange(4))
    assert np.array_equal(tokens.read(np.array([0]), 31)[0], np.arange(31))


def test_pickled_tokens_are_file_names(make_tokens):
    tokens = make_tokens(100_000)
    data = pickle.dumps(tokens)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data).read(np.array([5]), 3), [[5, 6, 7]])


def test_fixed_windows_follow_the_corpus_and_wrap(make_tokens):
    windows = FixedWindows(make_tokens(50, 51), seq_len=9, vocab_size=101)
    assert windows.n_samples == 11  # (101 - 1) // 9
    batch = windows.batch(0, 11)
    assert batch.dtype == np.int64
    assert np.array_equal(batch, np.arange(11)[:, None] * 9 + np.arange(10))
    assert np.array_equal(windows.batch(10, 2), batch[[10, 0]])


@pytest.mark.parametrize("sizes", [(101,), (30, 71), (12, 1, 88)])
@pytest.mark.parametrize("seq_len", [1, 7, 50, 100])
def test_an_epoch_is_every_window_once(make_tokens, sizes, seq_len):
    source = TokenWindows(make_tokens(*sizes), seq_len, vocab_size=101, data_seed=3)
    n_windows = 100 // seq_len
    assert source.n_samples == n_windows
    for epoch in range(3):
        batch = source.batch(epoch * n_windows, n_windows)
        assert sorted(batch[:, 0].tolist()) == [seq_len * i for i in range(n_windows)]
        assert np.array_equal(batch - batch[:, :1], np.broadcast_to(np.arange(seq_len + 1), batch.shape))


def test_order_belongs_to_seed_and_epoch(make_tokens):
    tokens = make_tokens(1001)

    def order(seed, epoch):
        return TokenWindows(tokens, 10, 1001, seed).batch(epoch * 100, 100)[:, 0].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 0) != sorted(order(0, 0))


class _Memory(ShardedTokens):
    def __init__(self, tokens):
        super().__init__([], "<i8")
        self._join([tokens], np.array([0]), np.array([0]), np.array([len(tokens)]))


_IN_MEMORY = _Memory(np.arange(64))


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "accumulation"),
    [(1, 24, 1), (1, 1, 24), (2, 3, 4), (3, 4, 2), (4, 6, 1), (24, 1, 1), (1, 7, 4), (5, 2, 3), (7, 4, 1), (7, 1, 4)],
)
def test_ranks_and_micro_batches_make_the_global_batch(world_size, micro_batch_size, accumulation):
    source = TokenWindows(_IN_MEMORY, 5, 64, data_seed=1)
    steps = {"first_step": 2, "last_step": 5, "sizes": BatchSizes(24), "micro_batch_size": micro_batch_size}
    ranks = [MicroBatches(source, rank=rank, world_size=world_size, **steps) for rank in range(world_size)]
    batches, weights = [list(rank) for rank in ranks], [rank.shares(2).weights(rank.rank) for rank in ranks]
    assert all(len(of_rank) == 3 * accumulation for of_rank in batches)
    assert all(len(of_rank) == accumulation for of_rank in weights)
    even = 24 % (world_size * accumulation) == 0
    for step in range(3):
        whole = source.batch((2 + step) * 24, 24)
        parts = [of_rank[step * accumulation + m] for of_rank in batches for m in range(accumulation)]
        of_parts = [weight for of_rank in weights for weight in of_rank]
        assert all(part.shape[1:] == (6,) and part.dtype == torch.int64 for part in parts)
        assert all(1 <= len(part) <= micro_batch_size for part in parts)
        assert (set(of_parts) == {1.0}) == even
        assert len({len(part) for part in parts}) <= (1 if even else 2)
        # What has no weight repeats a sequence of another.
        counted = [part for part, weight in zip(parts, of_parts, strict=True) if weight]
        assert np.array_equal(torch.cat(counted).numpy(), whole)
        # A mean over micro-batches and ranks, as gradients are averaged, is that over the sequences.
        means = [part.double().mean() * weight for part, weight in zip(parts, of_parts, strict=True)]
        assert float(sum(means)) / len(means) == pytest.approx(whole.mean(), rel=1e-12)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=6))
def test_what_is_kept_of_samples_nearby_is_theirs(asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearby, "NEAR", 16)
        kept = nearby.Nearby()
        for first, n in asked:
            squares, signs = kept.between(first, first + n, lambda samples: (samples**2, -samples))
            assert squares.tolist() == [i * i for i in range(first, first + n)]
            assert signs.tolist() == [-i for i in range(first, first + n)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_workers_keep_the_order(make_tokens, num_workers):
    source = TokenWindows(make_tokens(40, 61), 5, 101, data_seed=0)
    dataset = MicroBatches(
        source, first_step=1, last_step=6, sizes=BatchSizes(8), micro_batch_size=4, rank=1, world_size=2
    )
    loaded = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert len(loaded) == 5
    assert all(torch.equal(a, b) for a, b in zip(loaded, dataset, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("first_step", [0, 1, 4, 7])
def test_a_ramp_repeats_and_skips_no_sample_from_any_step_on(world_size, first_step):
    sizes, micro_batch_size = BatchSizes(8, BatchRamp(2, 3, 11)), 3
    steps = {"first_step": first_step, "last_step": 10, "sizes": sizes, "micro_batch_size": micro_batch_size}
    ranks = [MicroBatches(_source(), rank=rank, world_size=world_size, **steps) for rank in range(world_size)]
    batches = [iter(rank) for rank in ranks]
    seen = []
    for step in range(first_step, 10):
        for rank, of_rank in zip(ranks, batches, strict=True):
            for weight in rank.shares(step).weights(rank.rank):
                batch = next(of_rank)
                seen += [batch] if weight else []
    before = sum([2, 2, 2, 5, 8, 8, 8, 8, 8, 8][:first_step])
    assert np.array_equal(torch.cat(seen).numpy(), _source().batch(before, 59 - before))
    assert all(next(of_rank, None) is None for of_rank in batches)


def test_training_has_no_end():
    batches = iter(MicroBatches(_source(), first_step=2, sizes=BatchSizes(4), micro_batch_size=4))
    found = torch.cat([next(batches) for _ in range(100)])
    assert np.array_equal(found.numpy(), _source().batch(8, 400))


def test_reads_of_a_store_end_with_the_batches():
    class Slow(TokenWindows):
        def batch(self, start, n):
            if start:
                assert answers.wait(5)
            return super().batch(start, n)

    def reads():
        return [thread for thread in threading.enumerate() if thread.name == "stream"]

    answers = threading.Event()
    source = Slow(_IN_MEMORY, 5, 64, data_seed=1)
    batches = iter(MicroBatches(source, sizes=BatchSizes(2), micro_batch_size=2, from_store=True))
    assert next(batches).tolist() == source.batch(0, 2).tolist()
    assert len(reads()) > 9
    threading.Timer(0.3, answers.set).start()
    batches.close()
    assert not reads()


def _source():
    return TokenWindows(_IN_MEMORY, 5, 64, data_seed=1)


def test_more_processes_than_sequences():
    with pytest.raises(UsageError, match=r"trainer\.global_batch_size 2 is less than 3 processes: give 3 or more"):
        MicroBatches(_source(), sizes=BatchSizes(2), micro_batch_size=1, world_size=3)


@pytest.mark.parametrize("n_tokens", [0, 1, 10])
def test_too_few_tokens(make_tokens, n_tokens):
    with pytest.raises(UsageError, match=rf"data\.path: {n_tokens} train tokens .*model\.max_seq_len"):
        TokenWindows(make_tokens(n_tokens), 10, 64, data_seed=0)
    with pytest.raises(UsageError, match=r"data\.val_fraction"):
        FixedWindows(make_tokens(n_tokens), 10, 64)
    assert TokenWindows(make_tokens(11), 10, 64, data_seed=0).n_samples == 1


def test_the_order_does_not_depend_on_how_much_is_asked_for_at_once(make_tokens):
    def windows():
        return TokenWindows(make_tokens(3001), 2, 4000, data_seed=5)

    n = 4000
    whole = np.concatenate([permuted(np.arange(1500), 1500, "order", 5, epoch) for epoch in range(3)])[:n]
    source = windows()
    assert source.windows(np.arange(n)).tolist() == whole.tolist()
    rng = np.random.default_rng(0)
    for start, length in zip(rng.integers(0, n - 300, 60).tolist(), rng.integers(0, 300, 60).tolist(), strict=True):
        samples = rng.permutation(np.arange(start, start + length))
        assert source.windows(samples).tolist() == whole[samples].tolist()
        assert pickle.loads(pickle.dumps(source)).windows(samples).tolist() == whole[samples].tolist()
