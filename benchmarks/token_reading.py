"""Speed from token files to batches, and the wait for the first batch of a run on 100 GB of them.

    python benchmarks/token_reading.py [--rounds 7] [--gigabytes 100]

Random windows: batches of 64 sequences of 2,048 tokens, in the order of training, from our shards, a file of nanoGPT
and one of Megatron-LM whose documents are split (400 million tokens, in the page cache), against random windows copied
out of one array in memory by numpy's own indexing. Ways alternate within a round; each is divided by numpy of its
round, and the median counts. A mixture of eight sources is divided by one source in the same way.

First batch: `prepare` in a new process, of sparse files (they hold zeros and take no room), ``verify: size``.
Results go to ``benchmarks/results/token_reading.md``, or where ``--out`` says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from birthmark.data.batches import ShardedTokens, TokenWindows
from birthmark.data.config import DataConfig
from birthmark.data.mixture import Mixture, SourceOrder
from birthmark.data.token_file_formats import TokenFile
from birthmark.data.token_files import SpanTokens, TokenSource

HERE = Path(__file__).parent
BATCH, SEQ_LEN, VOCAB = 64, 2048, 50_257
TOKENS = 400_000_000

FIRST_BATCH = """
import sys, time
from birthmark.data.config import DataConfig
from birthmark.data.prepare import prepare
start = time.perf_counter()
data = prepare(DataConfig(**eval(sys.argv[1])), vocab_size=50304, seq_len=2048)
data.train.batch(0, 64)
print(time.perf_counter() - start, data.train.n_tokens)
"""


def megatron_index(path: Path, n_tokens: int, n_documents: int) -> None:
    """Write an index of documents of one length, of uint16."""
    lengths = np.full(n_documents, n_tokens // n_documents, dtype="<i4")
    lengths[-1] += n_tokens - int(lengths.sum(dtype=np.int64))
    starts = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    with path.open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n_documents, n_documents + 1))
        for part in (lengths, starts, np.arange(n_documents + 1, dtype="<i8")):
            file.write(part.tobytes())


def windows(folder: Path) -> dict[str, Callable[[int], np.ndarray]]:
    """Return a function for each way: number of a batch → int64 ``[BATCH, SEQ_LEN + 1]``."""
    path = folder / "a.bin"
    whole = np.random.default_rng(0).integers(0, VOCAB, TOKENS, dtype=np.uint16)
    whole.tofile(path)
    megatron_index(folder / "a.idx", TOKENS, 600_000)
    documents = TokenSource(DataConfig(path=str(path), cache_dir=str(folder / "cache"), verify="size"))
    sources = {
        "our shards": ShardedTokens([path], "<u2"),
        "nanoGPT, whole": SpanTokens([TokenFile("a", path, "<u2", TOKENS)], np.array([[0, 0, TOKENS]]), VOCAB),
        "Megatron-LM, by document": documents.split(None, VOCAB).train,
    }
    ways = {name: TokenWindows(tokens, SEQ_LEN, VOCAB, 0) for name, tokens in sources.items()}
    eighth = TOKENS // 8
    parts = {
        str(i): TokenWindows(
            SpanTokens([TokenFile("a", path, "<u2", TOKENS)], np.array([[0, i * eighth, eighth]]), VOCAB),
            *(SEQ_LEN, VOCAB, 0),
        )
        for i in range(8)
    }
    mixture = Mixture(parts, SourceOrder(list(parts), {name: 1.0 + int(name) for name in parts}))
    starts = np.random.default_rng(1).integers(0, TOKENS - SEQ_LEN - 1, 1 << 20)
    columns = np.arange(SEQ_LEN + 1)

    def by_index(number: int) -> np.ndarray:
        rows = starts[(number * BATCH) % len(starts) :][:BATCH]
        return whole[rows[:, None] + columns].astype(np.int64)

    found: dict[str, Callable[[int], np.ndarray]] = {"numpy, one array": by_index}
    for name, way in (*ways.items(), ("a mixture of eight", mixture)):
        found[name] = lambda number, way=way: way.batch(number * BATCH, BATCH)
    return found


def rates(rounds: int, batches: int = 40) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        ways = windows(Path(folder))
        tokens: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                for number in range(batches):
                    way(round_ * batches + number)
                tokens[name].append(batches * BATCH * SEQ_LEN / (time.perf_counter() - start) / 1e6)
    lines = ["| way | million tokens/s, median | fastest round | over numpy |", "|---|---|---|---|"]
    base = tokens["numpy, one array"][1:]
    for name, found in tokens.items():
        median = statistics.median(a / b for a, b in zip(found[1:], base, strict=True))
        lines.append(f"| {name} | {statistics.median(found[1:]):.0f} | {max(found[1:]):.0f} | {median:.2f} |")
    one, eight = tokens["nanoGPT, whole"][1:], tokens["a mixture of eight"][1:]
    cost = statistics.median(a / b for a, b in zip(one, eight, strict=True)) - 1
    return [*lines, "", f"A mixture of eight sources takes {cost:+.1%} of the time of one."]


def first_batches(gigabytes: float) -> list[str]:
    lines = ["| corpus | tokens | seconds to the first batch | the second time |", "|---|---|---|---|"]
    n_tokens = int(gigabytes * 1e9) // 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.bin")
        with path.open("wb") as file:
            file.truncate(2 * n_tokens)
        shared = {"cache_dir": f"{folder}/cache", "verify": "size"}
        cases = {"nanoGPT": {"path": str(path), "token_dtype": "uint16"}}
        paired = Path(folder, "pair")
        paired.mkdir()
        (paired / "b.bin").symlink_to(path)
        megatron_index(paired / "b.idx", n_tokens, 10_000_000)
        cases["Megatron-LM, 10 million documents"] = {"path": str(paired / "b.bin")}
        cases["our shards"] = {"path": str(shards(Path(folder, "shards"), n_tokens))}
        for name, fields in cases.items():
            seconds, found = [], ""
            for _ in range(2):
                command = [sys.executable, "-c", FIRST_BATCH, repr(fields | shared)]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                first, found = said.split()
                seconds.append(float(first))
            lines.append(f"| {name} | {int(found):,} | {seconds[0]:.2f} | {seconds[1]:.2f} |")
    return lines


def shards(folder: Path, n_tokens: int) -> Path:
    """Write sparse shards of the usual size, with their meta.json; their hashes, which nobody reads, are empty."""
    import json

    from birthmark.data.cache import fingerprint
    from birthmark.data.shards import SHARD_TOKENS

    folder.mkdir()
    files = {}
    splits = {"train": n_tokens - n_tokens // 50, "val": n_tokens // 50}
    for split, left in splits.items():
        for number in range(-(-left // SHARD_TOKENS)):
            n = min(SHARD_TOKENS, left - number * SHARD_TOKENS)
            name = f"{split}-{number:05d}.bin"
            with (folder / name).open("wb") as file:
                file.truncate(2 * n)
            files[name] = {"tokens": n, "bytes": 2 * n, "sha256": "0" * 64}
    meta = {
        "format": 1,
        "content_hash": "0" * 64,
        "tokenizer_hash": "0" * 64,
        "vocab_size": VOCAB,
        "dtype": "<u2",
        "skipped": {},
        "files": files,
        "splits": {split: {"documents": 1, "tokens": n, "bytes": 4 * n} for split, n in splits.items()},
        "unigram_entropy": 1.0,
    }
    (folder / "meta.json").write_text(json.dumps(meta | {"checksum": fingerprint(meta=meta)}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=100)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "token_reading.md")
    options = parser.parse_args()
    from machine import write_page

    load = os.getloadavg()[0]
    lines = ["# Reading token files", "", "## Random windows, one process, one thread", "", *rates(options.rounds)]
    lines += ["", f"## First batch of {options.gigabytes:g} GB", "", *first_batches(options.gigabytes)]
    write_page(options.out, lines, load)


if __name__ == "__main__":
    main()
