import time

import numpy as np
import pytest
import torch

from birthmark.data.backcopy import BOS, TRIGGERS, BackCopy, token_texts, trigger_mask
from birthmark.errors import UsageError

VOCAB_SIZES = [8, 64, 200]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("split", ["train", "val"])
def test_rules_of_the_language(vocab_size, bos, split):
    batch = BackCopy(vocab_size, 64, data_seed=4, split=split, bos=bos).batch(0, 500)
    assert batch.shape == (500, 65)
    assert batch.dtype == np.int64
    assert batch.max() < vocab_size
    assert (batch[:, 0] == BOS).all() == bos
    assert (batch[:, 1:] != BOS).all()
    for row in batch.tolist():
        for t in range(len(row)):
            if row[t] in TRIGGERS:
                assert t >= 1
                assert row[t - 1] not in (BOS, *TRIGGERS)
                assert t + 1 == len(row) or row[t + 1] == row[t - 1]
    assert 0.10 < np.isin(batch, TRIGGERS).mean() < 0.15
    assert all((batch == trigger).any() for trigger in TRIGGERS)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_frequencies_follow_the_table(vocab_size):
    """Chi-square of the successors of the most frequent tokens against their table rows."""
    source = BackCopy(vocab_size, 128, data_seed=1)
    batch = source.batch(0, 4000)
    previous, following = batch[:, :-1].ravel(), batch[:, 1:].ravel()
    # A copy follows no table: it stands behind a trigger, so `previous` leaves it out by itself.
    frequent = [BOS, *(np.bincount(previous, minlength=vocab_size)[4:].argsort()[::-1][:10] + 4).tolist()]
    for token in frequent:
        p_V = source.next_token_probabilities(token)
        assert p_V.sum() == pytest.approx(1)
        counts = np.bincount(following[previous == token], minlength=vocab_size)
        assert counts[p_V == 0].sum() == 0
        expected = p_V * counts.sum()
        tested = expected >= 5
        chi_square = ((counts - expected)[tested] ** 2 / expected[tested]).sum()
        assert chi_square < tested.sum() + 5 * np.sqrt(2 * tested.sum())


def test_entropy_is_that_of_the_table():
    source = BackCopy(64, 64, data_seed=0)
    entropy_V = source.next_token_entropy()
    for token in (BOS, 4, 30, 63):
        p = source.next_token_probabilities(token)
        assert entropy_V[token] == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum())
    assert (entropy_V[list(TRIGGERS)] == 0).all()
    # Learnable: well below a uniform choice among the 63 tokens that can follow.
    assert entropy_V[4:].mean() < 0.75 * np.log(63)


@pytest.mark.parametrize(("vocab_size", "bos"), [(64, True), (8, True), (200, False)])
def test_least_losses_are_the_log_probabilities_of_the_text(vocab_size, bos):
    source = BackCopy(vocab_size, 64, data_seed=0, split="val", bos=bos)
    batch, copied = source.batch(0, 1000), np.ones(vocab_size)
    table = np.stack([copied if t in TRIGGERS else source.next_token_probabilities(t) for t in range(vocab_size)])
    nll = -np.log(table[batch[:, :-1], batch[:, 1:]])
    np.testing.assert_allclose(source.least_losses(batch), nll, rtol=1e-12)
    # Entropies are what these losses are on average.
    expected = source.next_token_entropy()[batch[:, :-1]]
    assert (nll - expected).mean() == pytest.approx(0, abs=5 * nll.std() / np.sqrt(nll.size))


def test_pure_function_of_the_index():
    source = BackCopy(64, 33, data_seed=0)
    whole = source.batch(0, 100)
    assert np.array_equal(source.batch(37, 5), whole[37:42])
    assert np.array_equal(BackCopy(64, 33, data_seed=0).batch(99, 1), whole[99:])
    far = source.batch(10**12, 2)
    assert not np.array_equal(far, whole[:2])


def test_longer_samples_of_one_language():
    """The table belongs to data_seed alone."""
    short, long = BackCopy(64, 16, data_seed=0), BackCopy(64, 512, data_seed=0, split="val", bos=False)
    assert np.array_equal(short.next_token_probabilities(9), long.next_token_probabilities(9))


def test_seeds_and_splits_share_no_sample():
    sources = [BackCopy(64, 32, data_seed=seed, split=split) for seed in (0, 1) for split in ("train", "val")]
    rows = [row.tobytes() for source in sources for row in source.batch(0, 500)]
    assert len(set(rows)) == 4 * 500
    assert not np.array_equal(sources[0].next_token_probabilities(5), sources[2].next_token_probabilities(5))


def test_large_vocabularies_stay_sparse():
    source = BackCopy(5000, 32, data_seed=0)
    p_V = source.next_token_probabilities(100)
    assert (p_V > 0).sum() == 64 + 3
    batch = source.batch(0, 200)
    assert batch.max() > 4000
    assert batch.max() < 5000


def test_trigger_mask_marks_the_inputs_whose_target_is_a_copy():
    batch = torch.from_numpy(BackCopy(64, 64, data_seed=0).batch(0, 50))
    inputs, targets = batch[:, :-1], batch[:, 1:]
    mask = trigger_mask(inputs)
    assert mask.dtype == torch.bool
    rows, columns = mask.nonzero(as_tuple=True)
    assert torch.equal(targets[rows, columns], inputs[rows, columns - 1])
    assert mask.sum() == np.isin(inputs.numpy(), TRIGGERS).sum()


def test_token_texts():
    assert token_texts([0, 1, 3, 4, 63]) == ["BOS", "T1", "T3", "a1", "a60"]


def test_refusals():
    with pytest.raises(UsageError, match=r"model\.vocab_size: 7"):
        BackCopy(7, 64, 0)
    with pytest.raises(UsageError, match=r"model\.max_seq_len: 1"):
        BackCopy(8, 1, 0)
    with pytest.raises(ValueError, match="trigger"):
        BackCopy(8, 8, 0).next_token_probabilities(2)


def test_generation_keeps_up_with_training():
    source = BackCopy(64, 64, data_seed=0)
    best = min(_seconds(source, i) for i in range(20))
    assert best < 0.01  # a millisecond here; a training step of the smallest model takes several


def _seconds(source, i):
    start = time.perf_counter()
    source.batch(64 * i, 64)
    return time.perf_counter() - start
