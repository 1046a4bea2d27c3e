"""Speed from text to token shards: the survey of rows, and tokenising against the tokenizers library itself.

    python benchmarks/tokenise_speed.py [--rounds 5] [--workers 2] [--megabytes 24]

The survey is compared with what it was before rows were read in bulk (`one_by_one`, batches of 256 rows, each row a
Python string), on tables of rows of several lengths. Tokenising is compared with ``Tokenizer.encode_batch`` on the same
documents and as many threads as there are workers; ours reads the documents from files, and writes shards.

Ways alternate within a round; each is divided by the other of its round, and the median of these ratios counts.
Processor seconds of this process and its children stand beside wall time: they depend less on what else runs.
Results go to ``benchmarks/results/tokenise_speed.md``, or where ``--out`` says.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from birthmark.data import shards
from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.documents import text_hash
from birthmark.data.row_corpora import Rows
from birthmark.data.tokenizer import TextTokenizer, train_bpe

HERE = Path(__file__).parent
ROW_BYTES = (40, 400, 4000)


class Times(NamedTuple):
    """Seconds of one way."""

    wall: float
    processor: float


def timed(do: Callable[[], object]) -> Times:
    def processor() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    before, start = processor(), time.perf_counter()
    do()
    return Times(time.perf_counter() - start, processor() - before)


def alternating(old: Callable[[], object], new: Callable[[], object], rounds: int) -> list[tuple[Times, Times]]:
    return [(timed(old), timed(new)) for _ in range(rounds)]


def ratio(pairs: list[tuple[Times, Times]], of: str) -> float:
    return statistics.median(getattr(old, of) / getattr(new, of) for old, new in pairs)


def one_by_one(table: object) -> tuple[np.ndarray, np.ndarray, str]:
    """Survey a table as before, row by row."""
    total, hashes, sizes = hashlib.sha256(), [], []
    for batch in table.with_format("arrow").iter(batch_size=256):
        for text in batch["text"].to_pylist():
            content = (text or "").encode("utf-8")
            digest = hashlib.blake2b(content, digest_size=8, person=b"birthmark-split").digest()
            hashes.append(int.from_bytes(digest, "little"))
            sizes.append(len(content))
            total.update(hashlib.sha256(content).digest())
    return np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64), total.hexdigest()


def survey(rounds: int) -> list[str]:
    import datasets

    lines = [
        "| bytes a row | rows/s before | rows/s now | ratio, a local table | ratio, a hub set (hashes rows too) |",
        "|---|---|---|---|---|",
    ]
    for n_bytes in ROW_BYTES:
        n_rows = min(100_000, 40_000_000 // n_bytes)
        rng = random.Random(0)
        table = datasets.Dataset.from_dict({"text": [rng.randbytes(n_bytes // 2).hex() for _ in range(n_rows)]})
        with tempfile.TemporaryDirectory() as folder:
            datasets.disable_progress_bars()
            table.save_to_disk(folder)
            table = datasets.load_from_disk(folder)
            rows = Rows(table, 0, n_rows)
            _, sizes, _ = one_by_one(table)
            facts = rows.facts(with_sha256=False)
            assert facts.hashes.tolist() == [text_hash(text.encode()) for text in table["text"]]
            assert np.array_equal(facts.n_bytes, sizes)
            local = alternating(partial(one_by_one, table), partial(rows.facts, with_sha256=False), rounds)
            hub = alternating(partial(one_by_one, table), partial(rows.facts, with_sha256=True), rounds)
        before, now = (n_rows / statistics.median(pair[i].processor for pair in local) for i in (0, 1))
        ratios = f"{ratio(local, 'processor'):.1f} | {ratio(hub, 'processor'):.1f}"
        lines.append(f"| {n_bytes} | {before:,.0f} | {now:,.0f} | {ratios} |")
    return lines


def text_of(n_bytes: int) -> list[str]:
    """Read documents of about ``n_bytes`` in all: the source text of the standard library."""
    found: list[str] = []
    for document in open_corpus(DataConfig(path="stdlib")).documents():
        found.append(document.text)
        if sum(map(len, found)) > n_bytes:
            break
    return found


def tokenising(rounds: int, workers: int, megabytes: float) -> list[str]:
    texts = text_of(int(megabytes * 1e6))
    tokenizer = train_bpe(texts[:200], 8192)
    n_bytes = sum(len(text.encode()) for text in texts)
    # As many pieces for each worker as a corpus of some hundred megabytes has.
    shards._PIECE_BYTES = min(shards._PIECE_BYTES, n_bytes // (8 * workers))
    with tempfile.TemporaryDirectory() as folder:
        corpus_folder = Path(folder, "corpus")
        corpus_folder.mkdir()
        for i, text in enumerate(texts):
            (corpus_folder / f"{i:05d}.py").write_text(text, encoding="utf-8", newline="")
        raw = TextTokenizer(tokenizer.content)._tokenizer
        number = iter(range(1 << 30))

        def ours() -> None:
            corpus = open_corpus(DataConfig(path=str(corpus_folder)))
            assert corpus.n_bytes == n_bytes
            shards.tokenise_pieces(corpus, tokenizer, Path(folder, f"pieces{next(number)}"), "<u2", workers)

        pairs = alternating(lambda: raw.encode_batch(texts, add_special_tokens=False), ours, rounds)
    wall, processor = (
        [n_bytes / 1e6 / statistics.median(getattr(pair[i], of) for pair in pairs) for i in (0, 1)]
        for of in ("wall", "processor")
    )
    return [
        f"{n_bytes / 1e6:.0f} MB of Python source in {len(texts)} files, vocabulary of {tokenizer.vocab_size}, "
        f"{workers} workers against {os.environ['RAYON_NUM_THREADS']} threads:",
        "",
        "| MB/s | `encode_batch` | Birthmark, survey and files included | ratio |",
        "|---|---|---|---|",
        f"| by the clock | {wall[0]:.2f} | {wall[1]:.2f} | {ratio(pairs, 'wall'):.2f} |",
        f"| per processor second | {processor[0]:.2f} | {processor[1]:.2f} | {ratio(pairs, 'processor'):.2f} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tokenise_speed.md")
    options = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": str(options.workers), "TOKENIZERS_PARALLELISM": "true"}
    from machine import write_page

    load = os.getloadavg()[0]
    lines = ["# Tokenising", "", "## Survey of rows, in one process", "", *survey(options.rounds)]
    lines += ["", "## Documents to ids", ""]
    lines += tokenising(options.rounds, options.workers, options.megabytes)
    write_page(options.out, lines, load)


if __name__ == "__main__":
    main()
