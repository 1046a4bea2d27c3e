"""One global order, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from birthmark.data.batch_ramp import BatchRamp, BatchSizes
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.mixing.config import WeightChange
from birthmark.data.prepare import PreparedData, prepare
from birthmark.data.streaming.streamed_batches import Places, StreamedBatches, StreamSource
from birthmark.errors import RunError

SIZES = BatchSizes(13, BatchRamp(5, 4, 30))


@pytest.fixture
def mixed(streamed: DataConfig, write_set: Callable[[str], Path]) -> PreparedData:
    """Two sets in changing shares, in four streams each."""
    sources = [SourceConfig(str(streamed.path), 3.0), SourceConfig(str(write_set("books")), 1.0)]
    config = replace(streamed, path="stdlib", sources=sources, schedule=[WeightChange(7, {"books": 1.0})], n_streams=4)
    return prepare(config, vocab_size=320, seq_len=16, batch_sizes=SIZES)


def read(
    data: PreparedData, first: int, last: int, n_ranks: int, places: Places | None
) -> tuple[list[list[int]], Places]:
    """Rows of steps ``first`` to ``last`` that so many processes get, and where they stand then."""
    assert isinstance(data.train, StreamSource)
    ranks = [
        StreamedBatches(
            data.train,
            first_step=first,
            sizes=SIZES,
            micro_batch_size=3,
            rank=rank,
            world_size=n_ranks,
            places=places,
        )
        for rank in range(n_ranks)
    ]
    iterators, rows, after = [iter(batches) for batches in ranks], [], {}
    for step in range(first, last):
        for batches, iterator in zip(ranks, iterators, strict=True):
            for part in batches._shares(SIZES.size(step)).parts(batches.rank):
                batch = next(iterator)
                assert len(batch) == max(len(part), 1)
                rows += batch[: len(part)].tolist()
    for batches, iterator in zip(ranks, iterators, strict=True):
        next(iterator)  # what is read ahead does not count
        after |= batches.places(last)
        batches.close()
    return rows, after


def test_processes_that_come_and_go_read_one_order(mixed: PreparedData) -> None:
    whole, _ = read(mixed, 0, 16, 1, None)
    found, places = read(mixed, 0, 4, 1, None)
    for first, last, n_ranks in ((4, 7, 3), (7, 12, 2), (12, 14, 5), (14, 16, 1)):
        rows, places = read(mixed, first, last, n_ranks, places)
        found += rows
    assert found == whole
    assert len(set(map(tuple, whole))) == len(whole)
    # The shares that were asked, at the samples that were asked.
    texts = ["".join(mixed.token_texts(row)) for row in whole]
    assert mixed.mixture is not None
    source_N, _ = mixed.mixture.places(np.arange(len(whole)))
    for text, source in zip(texts, source_N.tolist(), strict=True):
        assert ("web␣" in text) <= (source == 0)
        assert ("books␣" in text) <= (source == 1)
    assert source_N[SIZES.before(7) :].tolist() == [1] * (len(whole) - SIZES.before(7))


def test_a_process_reads_the_streams_of_its_part_alone(mixed: PreparedData) -> None:
    assert isinstance(mixed.train, StreamSource)
    sizes = BatchSizes(16)
    for n_ranks, most in ((1, 4), (2, 2), (4, 1), (3, 2), (8, 1)):
        for rank in range(n_ranks):
            batches = StreamedBatches(mixed.train, sizes=sizes, micro_batch_size=4, rank=rank, world_size=n_ranks)
            assert len(batches.places(0)) <= 2 * most  # of two sources


def test_a_checkpoint_without_places_is_refused(mixed: PreparedData) -> None:
    assert isinstance(mixed.train, StreamSource)
    with pytest.raises(RunError, match=r"^checkpoint of step 3: does not say where stream 0/web stands"):
        StreamedBatches(mixed.train, first_step=3, sizes=SIZES, micro_batch_size=3)
