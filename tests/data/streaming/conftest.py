"""Sets in parquet files that are read as streams."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birthmark.data.config import DataConfig

N_ROWS = (70, 45, 90)
WORDS = "ein kleines Wörterbuch for the quick brown fox λ = σ ∑ 数据 emoji 🎈 def return self.value"


@pytest.fixture
def tokenizer_file(tmp_path, tokenizer):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer.content)
    return str(file)


@pytest.fixture
def write_set(tmp_path):
    """``write_set(name)``: a folder of three parquet files, whose rows say where they stand; some have no text."""

    def write(name):
        folder = tmp_path / name
        folder.mkdir()
        rng = np.random.default_rng(len(name))
        for i, n_rows in enumerate(N_ROWS):
            texts = [
                f"{name} {i} {row} {' '.join(rng.choice(WORDS.split(), rng.integers(1, 40)))}" for row in range(n_rows)
            ]
            texts[7], texts[20] = "", None
            # Several row groups, and a column that nobody reads.
            pq.write_table(pa.table({"n": range(n_rows), "text": texts}), folder / f"{i}.parquet", row_group_size=16)
        return folder

    return write


@pytest.fixture
def streamed(write_set, tokenizer_file, tmp_path):
    """One such set in three streams, a file for each."""
    places = {"path": str(write_set("web")), "tokenizer": tokenizer_file, "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**places, stream=True, n_streams=3, shuffle_buffer=8, val_documents=5, val_fraction=0.1)
