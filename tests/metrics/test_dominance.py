"""Dominance, massive activations and effective rank against all hidden states at once (definitions §7)."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.metrics import dominance
from birthmark.metrics.dominance import (
    DominanceRatio,
    EffectiveRank,
    MassiveActivations,
    RankBeside,
    RankOfPlaces,
    each_at_once,
    symmetric_eigenvalues,
)


def hidden(n=8, length=6, d=10, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, length, d)) * rng.uniform(0.3, 3, size=(length, d)) + 0.3).to(dtype)


def metrics(places, length, d, k=5):
    return DominanceRatio(places, length), MassiveActivations(places, length, d, k), EffectiveRank(places, d)


def measured(at_places, splits=(), k=5):
    _, length, d = at_places[0].shape
    made = metrics(len(at_places), length, d, k)
    for place, h in enumerate(at_places):
        for part in torch.tensor_split(h, list(splits)):
            for metric in made:
                metric.update(place, part)
    return [metric.compute() for metric in made]


def explicit(h, k=5):
    h = h.double().numpy()
    size = np.abs(h)
    ratio = (size.max(-1) / size.mean(-1)).mean(0)
    largest = size.max(0)
    order = np.argsort(-largest, axis=None, kind="stable")[:k]
    position, channel = np.unravel_index(order, largest.shape)
    values = np.linalg.svd(h.reshape(-1, h.shape[-1]), compute_uv=False)
    values = np.pad(values, (0, h.shape[-1] - len(values)))
    share = values[values > 0] / values.sum()
    return (
        (ratio, ratio[0], np.median(ratio)),
        (largest.flat[order], position, channel),
        (np.exp(-(share * np.log(share)).sum()), values / np.sqrt(h.shape[0] * h.shape[1])),
    )


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 9)),
    st.integers(0, 99),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_every_quantity_is_that_of_all_states_at_once(shape, seed, dtype):
    places = [hidden(*shape, seed=seed + i, dtype=dtype) for i in range(2)]
    results = measured(places)
    for place, h in enumerate(places):
        for kind, (result, expected) in enumerate(zip(results, explicit(h), strict=True)):
            # A singular value near 0 is the root of what rounding leaves of an eigenvalue.
            wide = dtype == torch.float64
            tolerance = {"rtol": 1e-6, "atol": 1e-6 if wide else 3e-3} if kind == 2 else {"rtol": 1e-6}
            if kind == 2 and not wide:
                tolerance["rtol"] = 1e-2
            for value, wanted in zip(result, expected, strict=True):
                np.testing.assert_allclose(value[place], wanted, **tolerance)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(1, 8), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_of_equal_activations_the_first_position_and_channel_is_listed_however_they_are_split(seed, split, dtype):
    h = hidden(9, seed=seed, dtype=dtype).round()
    for part in (h, h[torch.randperm(9, generator=torch.Generator().manual_seed(seed))]):
        found = measured([part], splits=(split,))[1]
        for value, wanted in zip(found, explicit(h)[1], strict=True):
            np.testing.assert_array_equal(value[0], wanted)


def test_the_rank_of_float32_states_is_good_to_a_ten_thousandth():
    h = hidden(40, 30, 64, dtype=torch.float32)
    rank, values = explicit(h)[2]
    found = measured([h])[2]
    np.testing.assert_allclose(found.effective_rank[0], rank, rtol=1e-4)
    np.testing.assert_allclose(found.singular_values[0], values, rtol=1e-4)
    assert (found.singular_values**2).sum() == pytest.approx(float(h.square().sum(-1).mean()))


def test_a_massive_channel_does_not_drown_the_other_directions():
    """Rounding is relative to the channels that a product is of."""
    h = hidden(40, 30, 64, dtype=torch.float32)
    h[:, 0, 7] += 3000
    np.testing.assert_allclose(measured([h])[2].effective_rank[0], explicit(h)[2][0], rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 10, 64])
def test_the_rank_does_not_depend_on_the_blocks(monkeypatch, rows):
    monkeypatch.setattr(dominance, "_MOMENT_ROWS", rows)
    np.testing.assert_allclose(measured([hidden()])[2].singular_values[0], explicit(hidden())[2][1], rtol=1e-9)


def test_dominance_runs_from_one_to_the_width():
    h = torch.ones(2, 3, 8)
    h[:, 1] = torch.eye(8)[5] * -7
    h[:, 2] = 0
    found = measured([h])[0]
    np.testing.assert_allclose(found.by_position[0], [1, 8, 1])
    assert (found.first[0], found.median[0]) == (1, 1)


def test_a_pair_counts_once_however_many_sequences_have_it():
    h = torch.zeros(4, 5, 6)
    h[:, 0, 3] = torch.tensor([9.0, -10.0, 8.0, 7.0])
    h[2, 4, 1] = -5
    for splits in ((), (1, 2, 3)):
        value, position, channel = measured([h], splits, k=2)[1]
        assert (value.tolist(), position.tolist(), channel.tolist()) == ([[10, 5]], [[0, 4]], [[3, 1]])


def test_states_of_zeros_have_no_rank():
    assert np.isnan(measured([torch.zeros(2, 2, 4)])[2].effective_rank).all()


# ---------------------------------------------------------------- work on many matrices at once
# The same numbers, and streams that wait for one another (metrics/dominance.py).


def symmetric(n, width):
    x = torch.randn(n, width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x + x.mT


def test_as_many_as_there_are_cores_give_what_each_gives_alone():
    matrices, n_threads = symmetric(5, 8), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = each_at_once(torch.linalg.eigvalsh, matrices, 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(n_threads)
    assert torch.equal(torch.stack(found), torch.stack([torch.linalg.eigvalsh(matrix) for matrix in matrices]))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_matrix_that_is_not_finite_has_no_eigenvalues(value):
    upper_DD = torch.eye(5, dtype=torch.float64)
    upper_DD[1, 3] = value
    assert symmetric_eigenvalues(upper_DD).isnan().all()


def test_eigenvalues_are_those_of_the_upper_half():
    matrices = symmetric(3, 40)
    unread = torch.full((40, 40), torch.nan, dtype=torch.float64).tril(-1)
    found = torch.stack(each_at_once(symmetric_eigenvalues, matrices.triu() + unread, 1))
    torch.testing.assert_close(found, torch.linalg.eigvalsh(matrices), rtol=1e-10, atol=1e-12)


class Stream:
    """Notes what waits for what."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def record_event(self):
        return Stream(self.log, f"{self.name}'s event")

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.name))


@pytest.fixture
def log(monkeypatch):
    """Of streams that stand in for a GPU's."""
    log = []
    streams = tuple(Stream(log, i) for i in range(dominance._STREAMS))
    caller = Stream(log, "caller")
    monkeypatch.setattr(dominance, "_streams", lambda _: streams)
    monkeypatch.setattr(dominance.torch.cuda, "current_stream", lambda _: caller)
    monkeypatch.setattr(dominance.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(dominance.torch.cuda, "stream", lambda stream: nullcontext(log.append((stream.name, "works"))))
    read = lambda _, stream: log.append((stream.name, "reads"))  # noqa: E731
    monkeypatch.setattr(dominance.torch.Tensor, "record_stream", read, raising=False)
    return log


CPU = torch.device("cpu")


def test_streams_wait_for_the_caller_and_it_for_them(log):
    matrices = list(symmetric(7, 4))
    streams = dominance.MatrixStreams(CPU, 3)
    found = streams.results([streams.submit(torch.linalg.eigvalsh, matrix) for matrix in matrices])
    assert torch.equal(torch.stack(found), torch.stack([torch.linalg.eigvalsh(matrix) for matrix in matrices]))
    assert log[-3:] == [("caller", "waits for", i) for i in range(3)]
    for i in range(3):
        of_stream = [entry[1:] for entry in log if entry[0] == i]
        assert of_stream == [("works",), ("waits for", "caller's event")] * (len(of_stream) // 2)
    assert sum(entry[1] == "works" for entry in log) == 7
    # What each gives is the caller's to read.
    assert sum(entry == ("caller", "reads") for entry in log) == 7


def test_the_caller_waits_too_where_one_fails(log):
    def fails(_):
        raise RuntimeError("no eigenvalues")

    streams = dominance.MatrixStreams(CPU, 2)
    with pytest.raises(RuntimeError, match="no eigenvalues"):
        streams.results([streams.submit(fails, matrix) for matrix in symmetric(3, 2)])
    assert log[-2:] == [("caller", "waits for", 0), ("caller", "waits for", 1)]


@pytest.mark.parametrize("n_shown", [8, 7])
def test_a_place_is_solved_once_all_sequences_have_shown_it(n_shown, log):
    h_SBTD = torch.stack([hidden(seed=seed) for seed in range(3)])
    rank, expected = RankBeside(EffectiveRank(3, 10), 8), EffectiveRank(3, 10)
    for batch in (slice(0, 5), slice(5, n_shown)):
        for place, h_BTD in enumerate(h_SBTD[:, batch]):
            expected.update(place, h_BTD)
            rank.update(place, h_BTD)
            assert len(rank.solving) == (place + 1 if batch.stop == 8 else 0)
    for found, wanted in zip(rank.compute(), expected.compute(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_places_passed_in_turn_have_the_rank_of_all_their_vectors():
    """Few vectors, few at first, and many at once; a pass uses the memory of what it shows again."""
    rank = RankOfPlaces(3, 12)
    for place, batches in enumerate(([1, 1], [1, 2, 5], [9])):
        h_BTD = torch.randn(sum(batches), 2, 12, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
        for lent_BTD in h_BTD.clone().split(batches):
            rank.update(place, lent_BTD)
            lent_BTD.fill_(torch.nan)
        rank.passed(place)
        values = np.linalg.svd(h_BTD.flatten(0, 1).numpy(), compute_uv=False)
        share, found = values / values.sum(), rank.compute()
        wanted = np.pad(values / len(h_BTD.flatten(0, 1)) ** 0.5, (0, 12 - len(values)))
        np.testing.assert_allclose(found.singular_values[place], wanted, rtol=1e-9, atol=1e-12)
        assert found.effective_rank[place] == pytest.approx(np.exp(-(share * np.log(share)).sum()))


@pytest.mark.cuda
def test_a_gpu_has_the_eigenvalues_of_the_cpu():
    h_BTD = torch.randn(4, 300, 128, generator=torch.Generator().manual_seed(0))
    both = []
    for device in ("cpu", "cuda"):
        metric = EffectiveRank(12, 128).to(device)
        for place in range(12):
            metric.update(place, (h_BTD * (1 + place)).to(device))
        both.append(metric.compute())
        if device == "cuda":
            beside = RankBeside(EffectiveRank(12, 128).to(device), 4)
            for place in range(12):
                beside.update(place, (h_BTD * (1 + place)).to(device))
            for found, alone in zip(beside.compute(), both[1], strict=True):
                np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)
    for cpu, cuda in zip(*both, strict=True):
        torch.testing.assert_close(torch.from_numpy(cuda), torch.from_numpy(cpu), rtol=1e-4, atol=1e-4)
