"""Small corpora and token files that several tests share."""

import random

import numpy as np
import pytest

from birthmark.data.batches import ShardedTokens
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
