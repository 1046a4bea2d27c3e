"""Batches come from a thread as they would come without one; what fails there fails here."""

import threading
import time

import pytest
import torch

from birthmark.data.batch_sizes import BatchSizes
from birthmark.data.process_batches import MicroBatches
from birthmark.errors import RunError
from birthmark.trainer.loop.training_data import ReadAhead
from birthmark.trainer.processes.joint_failure import Progress

CPU = torch.device("cpu")


class Counted:
    """Samples that are their own number; remembers who read them."""

    seq_len, vocab_size, n_tokens, n_samples = 3, 100, None, None

    def __init__(self, fails_at=None):
        self.fails_at, self.threads, self.read = fails_at, set(), 0

    def batch(self, first_sample, n):
        if first_sample == self.fails_at:
            raise RunError(f"sample {first_sample} is damaged")
        self.threads.add(threading.current_thread().name)
        self.read += 1
        return torch.arange(first_sample, first_sample + n)[:, None].expand(n, 4).numpy()


def micro_batches(source, last_step=20):
    return MicroBatches(source, first_step=3, last_step=last_step, sizes=BatchSizes(4), micro_batch_size=2)


def test_the_same_batches_in_the_same_order_read_by_another_thread():
    source = Counted()
    with ReadAhead(micro_batches(source), CPU, Progress()) as ahead:
        found = list(ahead)
    assert len(found) == 34
    assert all(torch.equal(a, b) for a, b in zip(found, micro_batches(Counted()), strict=True))
    assert source.threads == {"read-ahead"}


def test_it_reads_a_little_ahead_and_its_thread_ends_with_the_block():
    source = Counted()

    def interrupted():
        with ReadAhead(micro_batches(source, None), CPU, Progress()) as ahead:
            next(iter(ahead))
            while source.read < 3:
                time.sleep(0.001)
            time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert source.read == 3
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


def test_what_fails_in_the_thread_is_raised_at_its_batch_and_again():
    with ReadAhead(micro_batches(Counted(fails_at=18)), CPU, Progress()) as ahead:
        batches = iter(ahead)
        assert [int(next(batches)[0, 0]) for _ in range(3)] == [12, 14, 16]
        for _ in range(2):
            with pytest.raises(RunError, match="sample 18 is damaged"):
                next(batches)


def test_waiting_is_measured_and_the_thread_that_is_waited_for_is_known():
    progress, seen = Progress(), []

    def slow():
        for _ in range(3):
            time.sleep(0.1)
            seen.append(progress.waits_for == threading.get_ident())
            yield torch.zeros(1)

    with ReadAhead(slow(), CPU, progress) as ahead:
        assert len(list(ahead)) == 3
        assert all(seen)
        assert progress.waits_for is None
    assert 0.25 < progress.waited_s < 3


def test_batches_to_come_are_seen_and_stay_in_line():
    expected = list(micro_batches(Counted()))
    with ReadAhead(micro_batches(Counted()), CPU, Progress(), keep=True) as ahead:
        batches, found = iter(ahead), []
        for first in range(0, 34, 2):
            found.append(next(batches))
            if first == 4:
                found.append(next(batches))  # fetched before the step that it belongs to begins
            seen = ahead.upcoming(first, 2)
            assert all(torch.equal(a, b) for a, b in zip(seen, expected[first : first + 2], strict=True))
            if len(found) < first + 2:
                found.append(next(batches))
        with pytest.raises(StopIteration):
            next(batches)
    assert len(found) == 34
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
