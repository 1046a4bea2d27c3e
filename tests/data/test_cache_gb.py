"""Token files in a store, read in blocks through a cache much smaller than they are: fsspec's memory, and HTTP."""

import struct
import subprocess
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pytest

from birthmark.child_python import python_command, python_environment
from birthmark.data import remote, stored_files
from birthmark.data.batch_sizes import BatchSizes
from birthmark.data.block_cache import BlockCache
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.prepare import prepare
from birthmark.data.process_batches import MicroBatches
from birthmark.errors import RunError, UsageError

SEQ_LEN, VOCAB, CACHE_GB = 64, 60_000, 0.001


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of three files of 1 MB and one of a few bytes, in which every window differs."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, n in (("a", 500_003), ("b", 500_000), ("c", 499_999), ("d", 70)):
        rng.integers(0, VOCAB, n, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_BACK_OFF_S", 0.01)
    return DataConfig(
        cache_dir=str(tmp_path / "cache"), token_dtype="uint16", verify="size", val_fraction=0.01, timeout_s=30
    )


@pytest.fixture
def store(corpus):
    """The corpus in fsspec's memory."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    for path in corpus.iterdir():
        found.pipe_file(f"/big/{path.name}", path.read_bytes())
    yield found
    found.store.clear()


class Ranges:
    """Answers of an HTTP server that serves ranges of the corpus; a test may spoil some."""

    def __init__(self, corpus):
        self.files = {f"/{path.name}": path.read_bytes() for path in corpus.iterdir()}
        self.asked = Counter()
        self.spoil = lambda number, content: content
        self.says = "bytes {first}-{last}/{n}"

    def __call__(self, path, headers):
        if path == "/":
            page = "".join(f'<a href="{name}">x</a>' for name in self.files)
            return 200, {"Content-Type": "text/html"}, page.encode()
        if (content := self.files.get(path)) is None:
            return 404, {}, b""
        if (asked := headers.get("Range")) is None:
            return 200, {}, content
        self.asked[path] += 1
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        spoiled = self.spoil(self.asked.total(), content[first : last + 1])
        said = self.says.format(first=first, last=last, n=len(content))
        return (206 if spoiled else 503), {"Content-Range": said} if said else {}, spoiled


def read(config):
    return prepare(config, vocab_size=VOCAB, seq_len=SEQ_LEN)


def batches(data, n, **which):
    micro = MicroBatches(data.train, sizes=BatchSizes(8), micro_batch_size=2, from_store=True, **which)
    return [batch.tolist() for batch in islice(micro, n)]


def bytes_on_disk(config):
    return sum(path.stat().st_size for path in Path(config.cache_dir).glob("stored-blocks*"))


def test_batches_are_those_of_the_disk(config, corpus, store, serve):
    """3 MB of tokens through .8 MB: to the sample, from any step on and in any number of processes."""
    here = read(replace(config, path=str(corpus)))
    expected = [
        batch.tolist() for batch in islice(MicroBatches(here.train, sizes=BatchSizes(8), micro_batch_size=2), 24)
    ]
    answers = Ranges(corpus)
    for url in ("memory://big", f"{serve(answers)}/"):
        asked = replace(config, path=url, cache_gb=CACHE_GB)
        there = read(asked)
        same = ("content_hash", "tokens", "split", "unigram_entropy")
        assert {k: there.record[k] for k in same} == {k: here.record[k] for k in same}
        assert batches(there, 24) == expected
        assert batches(there, 8, first_step=4) == expected[16:]
        of_rank = [batches(there, 8, rank=rank, world_size=2) for rank in range(2)]
        assert [of_rank[i // 2 % 2][i // 4 * 2 + i % 2] for i in range(16)] == expected[:16]
        assert there.val.batch(0, 9).tolist() == here.val.batch(0, 9).tolist()
        assert bytes_on_disk(asked) <= CACHE_GB * 1e9
        assert not list(Path(config.cache_dir).glob("remote-*"))
    assert sum(map(len, answers.files.values())) > 3 * CACHE_GB * 1e9 - 100


def test_validation_and_documents_come_from_the_store_too(config, corpus, store):
    """A mixture of a store and a disk; documents that end with a token, and a packing that looks for all of them."""
    of_documents = replace(config, end_token=7, packing="documents", val_fraction=0.1)
    here = read(replace(of_documents, path=str(corpus)))
    there = read(replace(of_documents, path="memory://big", cache_gb=CACHE_GB))
    assert there.record["documents"] == here.record["documents"]
    assert batches(there, 8) == batches(here, 8)
    files = [SourceConfig(str(corpus / "a.bin"), 0.5, token_dtype="uint16")]
    of_b = [
        SourceConfig(path, 0.5, "b", token_dtype="uint16") for path in (str(corpus / "b.bin"), "memory://big/b.bin")
    ]
    plain = replace(config, token_dtype="")
    local, mixed = (replace(plain, sources=[*files, b]) for b in of_b)
    assert batches(read(replace(mixed, cache_gb=CACHE_GB)), 9) == batches(read(local), 9)


def test_a_block_that_is_there_is_not_asked_for(config, corpus, serve):
    answers = Ranges(corpus)
    asked = replace(config, path=f"{serve(answers)}/d.bin", cache_gb=CACHE_GB, val_fraction=0.5)
    first = prepare(asked, vocab_size=VOCAB, seq_len=8).train.batch(0, 3)
    before = answers.asked.total()
    stored_files._cache.cache_clear()  # as another process of the node, or the next start
    assert prepare(asked, vocab_size=VOCAB, seq_len=8).train.batch(0, 3).tolist() == first.tolist()
    assert answers.asked.total() == before


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("", ""),
        ("bytes {first}-{last}/*", ""),
        ("bytes 7-{last}/{n}", "its server answers the range 7-139 where 0-139 was asked for; leave out data.cache_gb"),
        ("bytes {first}-9/{n}", "its server answers the range 0-9 where 0-139 was asked for; leave out data.cache_gb"),
        ("bytes {first}-{last}/141", "has 141 bytes by now, and had 140; start again"),
    ],
)
def test_a_server_must_answer_the_range_that_is_asked_for(config, corpus, serve, says, message):
    answers = Ranges(corpus)
    answers.says = says
    asked = replace(config, path=f"{serve(answers)}/d.bin", cache_gb=CACHE_GB, val_fraction=0.5)
    with pytest.raises(UsageError, match=rf"/d\.bin: {message}") if message else nullcontext():
        prepare(asked, vocab_size=VOCAB, seq_len=8)


@pytest.mark.parametrize("fault", ["cut", "fails", "hangs"])
def test_a_store_that_fails_is_a_line_and_asked_again(config, corpus, serve, capsys, fault):
    answers = Ranges(corpus)
    config = replace(config, timeout_s=3 if fault == "hangs" else 30)
    here = read(replace(config, path=str(corpus / "a.bin")))
    there = read(replace(config, path=f"{serve(answers)}/a.bin", cache_gb=CACHE_GB))
    stored_files._cache.cache_clear()
    (Path(config.cache_dir) / "stored-blocks").unlink()  # else it holds nearly all that the batch asks for
    spoiled = answers.asked.total() + 1

    def spoil(number, content):
        if number != spoiled:
            return content
        if fault == "hangs":
            time.sleep(1.4)
        return {"cut": content[:-1], "fails": b"", "hangs": content}[fault]

    answers.spoil = spoil
    assert there.train.batch(0, 16).tolist() == here.train.batch(0, 16).tolist()
    said = capsys.readouterr().err.splitlines()
    words = {"cut": " bytes came of", "fails": "data.path: http://", "hangs": "no answer for "}[fault]
    assert [line for line in said if line.endswith("; asking again") and words in line]


def test_what_cannot_be_read_is_one_line(config, store, serve):
    asked = replace(config, path="memory://big/a.bin", cache_gb=CACHE_GB, timeout_s=1)
    there = read(asked)
    store.rm("/big/a.bin")
    with pytest.raises(RunError, match=r"^data\.path: memory://big/a\.bin: cannot be read after \d+ tries"):
        there.train.batch(0, 200)
    store.pipe_file("/big/a.bin", b"\0\0" * 10)
    # Of the ranges that are asked for together one begins before the end, the others behind it.
    cut = r"^data\.path: memory://big/a\.bin: cannot be read after \d+ tries \((20|0) bytes came of"
    with pytest.raises(RunError, match=cut):
        there.train.batch(0, 200)
    store.pipe_file("/texts/a.txt", b"text")
    whole = serve(lambda path, headers: (200, {}, b"\0" * 200_000))
    for path, message in (
        ("memory://texts", "data.cache_gb: memory://texts: no files of tokens there"),
        (f"{whole}/a.bin", "its server answers a range with the whole file; leave out data.cache_gb"),
    ):
        with pytest.raises(UsageError, match=message):
            read(replace(asked, path=path, timeout_s=30))


def test_fields_that_do_not_go_with_it():
    def problems(**fields):
        return "\n".join(DataConfig(cache_gb=1, **fields).problems())

    assert "no path is one; leave it out" in problems(path="stdlib", verify="size")
    assert "give data.verify size" in problems(path="s3://b/a.bin")
    assert not problems(path="s3://b/a.parquet", stream=True, tokenizer="s3://b/t.json", timeout_s=3)
    assert "no path is one" in problems(path="hf:NAME", stream=True, tokenizer="s3://b/t.json")
    assert DataConfig(cache_gb=0, path="s3://b/a.bin", verify="size").problems()[0].startswith("data.cache_gb")


# ── the cache alone ──────────────────────────────────────────────────────────────────────────────────────────────────


def key(number):
    return number.to_bytes(8, "little") * 2


def test_the_block_used_least_recently_goes(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 4096 + 4 * 140, 100)  # one set
    assert cache.n_sets == 1
    for number in range(4):
        cache.put(key(number), b"%d" % number * 100)
    assert cache.get(key(0)) == b"0" * 100
    cache.put(key(9), b"9")
    assert [cache.get(key(number)) for number in (0, 1, 9)] == [b"0" * 100, None, b"9"]
    cache.put(key(3), b"3")  # in its own place
    assert [cache.get(key(number)) for number in (2, 3)] == [b"2" * 100, b"3"]
    assert (tmp_path / "blocks").stat().st_size <= 4096 + 4 * 140


@pytest.mark.parametrize(("n_places", "n_blocks", "most"), [(100, 100, 0), (4096, 2048, 0), (4096, 3072, 0.04)])
def test_blocks_that_fit_are_fetched_once(tmp_path, n_places, n_blocks, most):
    """By reads in order, again and again: all of a small cache and half of a large one; of three quarters of that,
    Poisson's share in sets of more than 64 places where 48 are expected is 1.6 %.
    """
    n_bytes = 4096 + n_places * 50
    cache, rng = BlockCache(tmp_path / "blocks", n_bytes, 10), np.random.default_rng(n_blocks)
    keys, missed = [rng.bytes(16) for _ in range(n_blocks)], 0
    for number in range(3 * n_blocks):
        key = keys[number % n_blocks]
        if cache.get(key) is None:
            missed += 1
            cache.put(key, key[:10])
    assert 0 <= missed - n_blocks <= most * 2 * n_blocks
    assert (tmp_path / "blocks").stat().st_size <= n_bytes


def test_blocks_that_are_put_at_once_take_places_of_their_own(tmp_path, monkeypatch):
    cache, keys = BlockCache(tmp_path / "blocks", 4096 + 100 * 50, 10), [bytes([n]) * 16 for n in range(1, 33)]
    empty = cache._set(cache._places_at(keys[0]))
    with monkeypatch.context() as none_sees_another:
        none_sees_another.setattr(cache, "_set", lambda places: empty)
        for key in keys:
            cache.put(key, key[:10])
    assert all(cache.get(key) == key[:10] for key in keys)


def test_a_damaged_block_is_missing(tmp_path):
    path = tmp_path / "blocks"
    cache = BlockCache(path, 1 << 16, 1000)
    cache.put(key(3), b"x" * 1000)
    content = bytearray(path.read_bytes())
    content[content.index(b"x" * 1000) + 500] = 0
    path.write_bytes(content)
    assert cache.get(key(3)) is None


def test_blocks_of_before_the_clock_was_set_back_make_room(tmp_path):
    path = tmp_path / "blocks"
    cache = BlockCache(path, 4096 + 4 * 140, 100)  # one set
    for number in range(4):
        cache.put(key(number), b"%d" % number)
    with path.open("r+b") as file:
        for place in range(4):  # each: key, time of its last use in ns, …; as if used in a year from now
            file.seek(4096 + 40 * place + 16)
            file.write(struct.pack("<Q", time.time_ns() + 365 * 86400 * 10**9))
    for number in range(4, 8):
        cache.put(key(number), b"%d" % number)
    assert [cache.get(key(number)) for number in range(8)] == [None] * 4 + [b"4", b"5", b"6", b"7"]


_HOLDER = """
import sys
from pathlib import Path
from birthmark.data.block_cache import BlockCache
cache = BlockCache(Path(sys.argv[1]), 1 << 16, 1000)
cache.put(b"a" * 16, b"of the first")
print("open", flush=True)
sys.stdin.readline()
print(cache.get(b"b" * 16).decode())
"""


def test_runs_of_two_sizes_at_once_share_one_file(tmp_path, python):
    """Else each start leaves the file of the other run to it, without a name and with all its room."""
    path, larger = tmp_path / "blocks", 1 << 18
    first = subprocess.Popen(
        [python, "-c", _HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "open\n"
        second = BlockCache(path, larger, 1000)
        second.put(b"b" * 16, b"of the second")
        assert second.get(b"a" * 16) == b"of the first"
        assert first.communicate("\n", timeout=60)[0] == "of the second\n"
    finally:
        first.kill()
    for number in range(1000):
        second.put(key(number), b"x" * 1000)
    assert path.stat().st_size <= 1 << 16
    del second
    # Nobody has it open any more: now it gets the size that is asked for.
    third = BlockCache(path, larger, 1000)
    for number in range(1000):
        third.put(key(number), b"x" * 1000)
    assert 1 << 16 < path.stat().st_size <= larger


_WRITER = """
import sys, random
from pathlib import Path
from birthmark.data.block_cache import BlockCache
cache, rng, hits = BlockCache(Path(sys.argv[1]), 1 << 16, 1000), random.Random(int(sys.argv[2])), 0
for _ in range(4000):
    n = rng.randrange(200)
    key, right = n.to_bytes(8, "little") * 2, bytes([n]) * (1 + 5 * n)
    found = cache.get(key)
    assert found in (None, right[:1000])
    hits += found is not None
    if found is None:
        cache.put(key, right[:1000])
assert hits
"""


def test_processes_and_threads_share_it(tmp_path):
    path = tmp_path / "blocks"
    running = [
        subprocess.Popen(python_command("-c", _WRITER, str(path), str(seed)), env=python_environment({}))
        for seed in range(2)
    ]
    assert [process.wait(60) for process in running] == [0, 0]
    assert path.stat().st_size <= 1 << 16
