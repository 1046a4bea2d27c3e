"""Small corpora and token files that several tests share."""

import random

import numpy as np
import pytest

from birthmark.data.batches import ShardedTokens
from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.tokenizer import train_bpe

WORDS = "ein kleines Wörterbuch for the quick brown fox λ = σ ∑ 数据 emoji 🎈 def return self.value if else"


def make_text(seed, n_words):
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS.split()) + rng.choice([" ", " ", "\n", "  ", "\n    "]) for _ in range(n_words))


@pytest.fixture
def folder(tmp_path):
    """Forty text files in nested folders."""
    root = tmp_path / "corpus"
    for i in range(40):
        path = root / f"part{i % 3}" / f"file{i:02d}.{('txt', 'md', 'py')[i % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_text(i, 60 + 10 * i), encoding="utf-8", newline="")
    return root


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe([make_text(i, 400) for i in range(5)], 320)


@pytest.fixture
def make_tokens(tmp_path):
    """Token files that hold 0, 1, 2, …, split at the given sizes."""

    def make(*sizes, dtype="<u4"):
        paths = []
        start = 0
        for i, size in enumerate(sizes):
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}-{i}.bin"
            np.arange(start, start + size).astype(dtype).tofile(path)
            paths.append(path)
            start += size
        return ShardedTokens(paths, dtype)

    return make


@pytest.fixture
def open_table(tmp_path):
    """``open_table(*paths, **fields)``: the corpus of these tables."""

    def open_(*paths, **fields):
        plain = {"val_fraction": 0.2, "cache_dir": str(tmp_path / "cache"), "n_workers": 1}
        return open_corpus(DataConfig(path=[str(path) for path in paths], **(plain | fields)))

    return open_


@pytest.fixture(scope="session")
def write_table():
    """``write_table(path, texts, column)``: a table of this suffix, by the library itself; returns the path."""
    import datasets

    def write(path, texts, column="text"):
        table = datasets.Dataset.from_dict({"id": list(range(len(texts))), column: list(texts)})
        if path.suffix == ".parquet":
            table.to_parquet(path)
        elif path.suffix == ".csv":
            table.to_csv(path)
        elif path.suffix == ".arrow":
            table.save_to_disk(path.with_suffix(""))
            next(path.with_suffix("").glob("*.arrow")).rename(path)
        else:
            table.to_json(path, lines=path.suffix == ".jsonl", orient="records")
        return path

    return write
