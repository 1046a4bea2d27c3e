"""Work on many matrices at once: the same numbers, and streams that wait for one another (metrics/dominance.py)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from birthmark.metrics import dominance
from birthmark.metrics.dominance import EffectiveRank, each_at_once, symmetric_eigenvalues


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
    monkeypatch.setattr(
        dominance.torch.Tensor, "record_stream", lambda _, stream: log.append((stream.name, "reads")), raising=False
    )
    return log


def test_streams_wait_for_the_caller_and_it_for_them(log):
    matrices = list(symmetric(7, 4))
    found = dominance._on_streams(torch.linalg.eigvalsh, matrices, 3)
    assert torch.equal(torch.stack(found), torch.stack([torch.linalg.eigvalsh(matrix) for matrix in matrices]))
    assert log[:3] == [(i, "waits for", "caller") for i in range(3)]
    assert log[-3:] == [("caller", "waits for", i) for i in range(3)]
    at_work = log[3:-3]
    assert sum(entry[1] == "works" for entry in at_work) == 7
    # What each gives is the caller's to read.
    assert sum(entry == ("caller", "reads") for entry in at_work) == 7


def test_the_caller_waits_too_where_one_fails(log):
    def fails(_):
        raise RuntimeError("no eigenvalues")

    with pytest.raises(RuntimeError, match="no eigenvalues"):
        dominance._on_streams(fails, list(symmetric(3, 2)), 2)
    assert log[-2:] == [("caller", "waits for", 0), ("caller", "waits for", 1)]


@pytest.mark.cuda
def test_a_gpu_has_the_eigenvalues_of_the_cpu():
    h_BTD = torch.randn(4, 300, 128, generator=torch.Generator().manual_seed(0))
    both = []
    for device in ("cpu", "cuda"):
        metric = EffectiveRank(12, 128).to(device)
        for place in range(12):
            metric.update(place, (h_BTD * (1 + place)).to(device))
        both.append(metric.compute())
    for cpu, cuda in zip(*both, strict=True):
        torch.testing.assert_close(torch.from_numpy(cuda), torch.from_numpy(cpu), rtol=1e-4, atol=1e-4)
