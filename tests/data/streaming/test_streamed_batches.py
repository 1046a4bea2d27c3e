"""One global order, whoever reads it."""

import gzip
import json
import shutil
import threading
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from birthmark.data import remote, streaming
from birthmark.data.batch_sizes import BatchRamp, BatchSizes
from birthmark.data.config import SourceConfig, WeightChange
from birthmark.data.mixture import SourceOrder
from birthmark.data.prepare import prepare
from birthmark.data.process_batches import StreamedBatches, StreamSource
from birthmark.data.stored_files import _cache
from birthmark.data.streaming import ShuffledOrder, Stream, StreamSettings
from birthmark.errors import RunError, UsageError

SIZES = BatchSizes(13, BatchRamp(5, 4, 30))


@pytest.fixture
def mixed(streamed, write_set):
    """Two sets in changing shares, in four streams each."""
    sources = [SourceConfig(str(streamed.path), 3.0), SourceConfig(str(write_set("books")), 1.0)]
    config = replace(streamed, path="stdlib", sources=sources, schedule=[WeightChange(7, {"books": 1.0})], n_streams=4)
    return prepare(config, vocab_size=320, seq_len=16, batch_sizes=SIZES)


def read(source, first, last, n_ranks, places, sizes=SIZES):
    """Rows of steps ``first`` to ``last`` that so many processes get, and where they stand then."""
    ranks = [
        StreamedBatches(
            source, first_step=first, sizes=sizes, micro_batch_size=3, rank=rank, world_size=n_ranks, places=places
        )
        for rank in range(n_ranks)
    ]
    iterators, rows, after = [iter(batches) for batches in ranks], [], {}
    for step in range(first, last):
        for batches, iterator in zip(ranks, iterators, strict=True):
            for part in batches._shares(sizes.size(step)).parts(batches.rank):
                batch = next(iterator)
                assert len(batch) == max(len(part), 1)
                rows += batch[: len(part)].tolist()
    for batches, iterator in zip(ranks, iterators, strict=True):
        next(iterator)  # what is read ahead does not count
        after |= batches.places(last)
        batches.close()
    return rows, after


def test_streams_whose_store_does_not_answer_end_together(mixed, monkeypatch):
    def silent(self, place):
        buffers = fill(self, place)
        yield next(buffers)
        assert answers.wait(30)

    fill, answers = Stream._fill, threading.Event()
    monkeypatch.setattr(Stream, "_fill", silent)
    monkeypatch.setattr(streaming, "_END_S", 0.5)
    batches = StreamedBatches(mixed.train, sizes=SIZES, micro_batch_size=3)
    next(iter(batches))
    reads = [thread for thread in threading.enumerate() if thread.name == "stream"]
    assert len(reads) > 3
    start = time.monotonic()
    batches.close()
    assert 0.5 <= time.monotonic() - start < 1
    answers.set()
    for thread in reads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("cache_gb", [None, 0.001])
def test_tables_in_a_store_come_in_the_order_of_the_disk(streamed, cache_gb):
    """And leave nothing on it but validation's text, and pointers and blocks where a cache is asked for."""
    store = fsspec.filesystem("memory")
    for file in Path(str(streamed.path)).iterdir():
        store.pipe_file(f"/tables/{file.name}", file.read_bytes())
    rows, records = [], []
    for config in (streamed, replace(streamed, path="memory://tables/*.parquet", cache_gb=cache_gb)):
        data = prepare(config, vocab_size=320, seq_len=16, batch_sizes=SIZES)
        begun, places = read(data.train, 0, 3, 2, None)
        rows.append(begun + read(data.train, 3, 6, 1, places)[0])
        records.append(data.record | {"content_hash": "", "path": ""})
    assert rows[0] == rows[1]
    assert records[0] == records[1]
    left = {path.name.partition("-")[0] for path in Path(streamed.cache_dir).iterdir()}
    assert left == ({"heldout"} if cache_gb is None else {"heldout", "stored"})


def test_streams_that_share_a_table_fetch_it_once(streamed, serve, tmp_path, monkeypatch):
    """Through a cache that holds it: later passes, processes and starts ask for nothing. Through a smaller one they
    read the same.
    """
    rng = np.random.default_rng(0)
    rows = [
        {"text": f"{row} {'quick brown fox ' * 9}", "other": b64encode(rng.bytes(2000)).decode()} for row in range(600)
    ]
    content = "".join(f"{json.dumps(row)}\n" for row in rows)
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(content.encode()))
    fetched: list[int] = []
    gone: list[bool] = []

    def answer(path, headers):
        if path != "/rows.jsonl.gz" or gone:
            return 404, {}, b""
        if "Range" not in headers:
            return 200, {"Accept-Ranges": "bytes"}, file.read_bytes()
        first, last = map(int, headers["Range"].removeprefix("bytes=").split("-"))
        fetched.append(last + 1 - first)
        return 206, {}, file.read_bytes()[first : last + 1]

    def batches(config):
        _cache.cache_clear()
        data = prepare(config, vocab_size=320, seq_len=16, batch_sizes=SIZES)
        first, places = read(data.train, 0, 3, 2, None)
        asked = sum(fetched)
        return first + read(data.train, 3, 6, 3, places)[0], asked

    streamed = replace(streamed, n_streams=4)
    expected, _ = batches(replace(streamed, path=str(file)))
    url = f"{serve(answer)}/rows.jsonl.gz"
    assert file.stat().st_size > 1e6
    assert batches(replace(streamed, path=url, cache_gb=0.01)) == (expected, sum(fetched))
    # Validation, four streams and two passes: the file, and the parts that identify it.
    assert sum(fetched) < 3 * file.stat().st_size
    fetched.clear()
    assert batches(replace(streamed, path=url, cache_gb=0.01)) == (expected, 0)
    shutil.rmtree(streamed.cache_dir)
    assert batches(replace(streamed, path=url, cache_gb=0.001))[0] == expected
    assert sum(path.stat().st_size for path in Path(streamed.cache_dir).glob("stored-blocks*")) <= 1e6
    with pytest.raises(UsageError, match=r"^data\.path: cannot open 'http://\S+/other\.jsonl' \(Unable to find"):
        batches(replace(streamed, path=url.replace("rows.jsonl.gz", "other.jsonl"), cache_gb=0.001))
    data = prepare(replace(streamed, path=url, cache_gb=0.001), vocab_size=320, seq_len=16)
    monkeypatch.setattr(remote, "_BACK_OFF_S", 0.01)
    gone.append(True)
    _cache.cache_clear()
    for blocks in Path(streamed.cache_dir).glob("stored-blocks*"):
        blocks.unlink()
    with pytest.raises(UsageError, match=r"^data\.path: http://\S+/rows\.jsonl\.gz: is not there; check the address$"):
        read(data.train, 0, 1, 1, None)


def test_processes_that_come_and_go_read_one_order(mixed):
    whole, _ = read(mixed.train, 0, 16, 1, None)
    found, places = read(mixed.train, 0, 4, 1, None)
    for first, last, n_ranks in ((4, 7, 3), (7, 12, 2), (12, 14, 5), (14, 16, 1)):
        rows, places = read(mixed.train, first, last, n_ranks, places)
        found += rows
    assert found == whole
    assert len(set(map(tuple, whole))) == len(whole)
    # The shares that were asked, at the samples that were asked.
    texts = ["".join(mixed.token_texts(row)) for row in whole]
    source_N, _ = mixed.mixture.places(np.arange(len(whole)))
    for text, source in zip(texts, source_N.tolist(), strict=True):
        assert ("web␣" in text) <= (source == 0)
        assert ("books␣" in text) <= (source == 1)
    assert source_N[SIZES.before(7) :].tolist() == [1] * (len(whole) - SIZES.before(7))


def test_a_process_reads_the_streams_of_its_part_alone(mixed):
    sizes = BatchSizes(16)
    for n_ranks, most in ((1, 4), (2, 2), (4, 1), (3, 2), (8, 1)):
        for rank in range(n_ranks):
            batches = StreamedBatches(mixed.train, sizes=sizes, micro_batch_size=4, rank=rank, world_size=n_ranks)
            assert len(batches.places(0)) <= 2 * most  # of two sources


class NumberedStream:
    """Rows that say which they are: the stream's number, that of its source, and how many came before."""

    def __init__(self, number, source, place):
        self._which, self.place = (number, source), place

    def take(self, n):
        first = self.place.samples
        self.place = self.place._replace(samples=first + n)
        return np.array([(*self._which, first + i) for i in range(n)], dtype=np.int64).reshape(n, 3)

    def stop(self):
        return []


@pytest.fixture
def numbered(tokenizer, monkeypatch):
    """``numbered(weights, sizes)``: sources of those weights in eight streams each, which are `NumberedStream`."""

    def stream(self, number, source, place):
        return NumberedStream(number, list(self.tables).index(source), place)

    monkeypatch.setattr(StreamSource, "stream", stream)

    def make(weights, sizes):
        names = [str(i) for i in range(len(weights))]
        order = ShuffledOrder(SourceOrder(names, dict(zip(names, weights, strict=True))), sizes, 0)
        tables = dict.fromkeys(names)
        return StreamSource(tables, tokenizer, order, StreamSettings(8, 1, 2, 0, 0.1, None))

    return make


@pytest.mark.parametrize(
    ("weights", "size"), [([1], 4), ([1], 12), ([1, 1], 8), ([3, 1], 16), ([1, 1], 6), ([5, 3, 2], 8), ([15, 1], 64)]
)
def test_all_streams_of_a_source_are_read_alike(numbered, weights, size):
    """Where the pattern of the sources repeats with the batch too, and in batches of fewer samples than streams."""
    n_steps, sizes = 400, BatchSizes(size)
    rows_N3 = np.array(read(numbered(weights, sizes), 0, n_steps, 1, None, sizes)[0])
    assert len(rows_N3) == n_steps * size
    shares = np.array(weights) / sum(weights)
    for n in range(size, len(rows_N3) + 1, size):
        assert (abs(np.bincount(rows_N3[:n, 1], minlength=len(weights)) - n * shares) < max(1, n / 1000)).all()
    for source, share in enumerate(shares):
        for number in range(8):
            samples = rows_N3[(rows_N3[:, 0] == number) & (rows_N3[:, 1] == source), 2]
            expected = len(rows_N3) * share / 8
            # Five standard deviations of what a shuffled mixture gives; one source takes turns.
            assert abs(len(samples) - expected) <= (5 * expected**0.5 if len(weights) > 1 else 0)
            assert sorted(samples) == list(range(len(samples)))


@pytest.mark.parametrize("size", [6, 8, 20])
def test_who_reads_makes_no_difference_to_small_and_odd_batches(numbered, size):
    sizes = BatchSizes(size)
    source = numbered([3, 1], sizes)
    whole, _ = read(source, 0, 30, 1, None, sizes)
    found, places = read(source, 0, 5, 4, None, sizes)
    for first, last, n_ranks in ((5, 12, 1), (12, 19, 3), (19, 30, 6)):
        rows, places = read(source, first, last, n_ranks, places, sizes)
        found += rows
    assert found == whole


def test_a_checkpoint_without_places_is_refused(mixed):
    with pytest.raises(RunError, match=r"^checkpoint of step 3: does not say where stream 0/web stands"):
        StreamedBatches(mixed.train, first_step=3, sizes=SIZES, micro_batch_size=3)
