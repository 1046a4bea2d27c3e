"""Where tokens come from, as a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and the order of the training data."""

    path: str | list[str] = "stdlib"
    """Corpus: ``stdlib`` (source text of the running Python's standard library), ``backcopy`` (the bigram-backcopy
    task), one or more .txt/.md/.py files or folders, ``hf:NAME[:CONFIG]`` (anything that ``datasets`` loads), or a
    local .parquet/.arrow/.json/.jsonl/.csv file."""

    tokenizer: str = "bpe"
    """``bpe`` trains a byte-level BPE of model.vocab_size tokens on the corpus; else the path of a ``tokenizers``
    JSON file. Not used by ``backcopy``."""

    data_seed: int = 0
    """Decides the order of the training data (and the text of ``backcopy``), and nothing else."""

    val_fraction: float = 0.02
    """Share of the corpus's documents kept for validation, in (0, 1); the split depends on each document's name or
    content, not on its place."""

    text_field: str = "text"
    """Column that holds the text, for ``hf:`` and tabular corpora."""

    cache_dir: str = "~/.cache/birthmark"
    """Where tokenizers and token shards are kept; they are built once and verified when reused."""

    n_workers: int = 0
    """Processes that load and tokenise ``datasets`` corpora; 0 takes one per core."""

    bos: bool = True
    """Start every ``backcopy`` sequence with BOS (the sink's home; without it none forms)."""

    verify: Literal["checksum", "size"] = "checksum"
    """How shards are verified when reused: SHA-256 of every byte, or file sizes only (for corpora of terabytes)."""
