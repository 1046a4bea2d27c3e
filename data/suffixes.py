"""Suffixes of the files that hold documents or tokens, and of those beside them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TEXT_SUFFIXES = (".txt", ".md", ".py")
"""Files that are one document each."""

TABLE_SUFFIXES = (".parquet", ".arrow", ".json", ".jsonl", ".csv")
"""Files whose rows are documents; read through ``datasets``."""

COMPRESSIONS = (".gz", ".zst")
"""Compressions of text, .json, .jsonl and .csv files: ``notes.txt.gz`` is read as ``notes.txt``."""


class TokenFiles(NamedTuple):
    """Suffixes of the files of one format of tokens."""

    tokens: tuple[str, ...]
    """Files that hold tokens and nothing else that is read often."""

    beside: tuple[str, ...] = ()
    """Files that describe one of these: suffixes in place of its suffix. A plain one, as ``.idx``, may be named."""

    is_folder: bool = False
    """True if a path names the folder of these files, not a file of them."""


TOKEN_FILES = {
    "raw": TokenFiles((".bin", ".npy")),
    "Megatron-LM": TokenFiles((".bin",), beside=(".idx",)),
    "llm.c": TokenFiles((".bin",)),
    "numpy": TokenFiles((".npy",)),
    "datatrove": TokenFiles((".ds",), beside=(".ds.index", ".ds.metadata")),
    "litdata": TokenFiles((".bin",), is_folder=True),
    "MDS": TokenFiles((".mds",), is_folder=True),
}
"""Formats of token files by name; `birthmark.data.token_file_formats.FORMATS` recognises and reads them."""


def corpus_suffix(name: str) -> str:
    """Return the suffix that gives a file's kind, in small letters, ignoring a supported compression."""
    path = Path(name.lower())
    if (suffix := path.suffix) not in COMPRESSIONS:
        return suffix
    inner = Path(path.stem).suffix
    return inner if inner in (*TEXT_SUFFIXES, ".json", ".jsonl", ".csv") else suffix


def described_by(index: str) -> tuple[str, ...]:
    """Return the suffixes of the token files that a file with this plain suffix describes: ``.idx`` a ``.bin``."""
    return tuple(suffix for files in TOKEN_FILES.values() if index in files.beside for suffix in files.tokens)


def files_beside(suffix: str) -> tuple[str, ...]:
    """Return the suffixes, in place of this one, of the files that go with a token file or its index."""
    describing = (other for files in TOKEN_FILES.values() if suffix in files.tokens for other in files.beside)
    return tuple(dict.fromkeys((*describing, *described_by(suffix))))


def token_suffixes() -> tuple[str, ...]:
    """Return the suffixes of token files and indexes that a path may name."""
    named = (
        suffix
        for files in TOKEN_FILES.values()
        if not files.is_folder
        for suffix in (*files.tokens, *(index for index in files.beside if Path(f"_{index}").suffix == index))
    )
    return tuple(dict.fromkeys(named))
