"""Table of the formats of token files, and the detection of a path's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ..config import TABLE_SUFFIXES, TEXT_SUFFIXES, TOKEN_SUFFIXES
from ..text_files import walk
from .layout import TokenFile
from .litdata import is_litdata, read_litdata
from .llm_c import is_llm_c, read_llm_c
from .megatron import is_megatron, read_megatron
from .raw import is_numpy, read_numpy, read_raw


@dataclass(frozen=True)
class TokenFormat:
    """Recognition and reading of one kind of token files."""

    name: str
    suffix: str
    """Suffix of its files; "": it is a folder."""

    recognises: Callable[[Path], bool]
    read: Callable[[str, Path, str], list[TokenFile]]
    """Function that reads the files, from a key, the path and ``data.token_dtype``."""


#: The first that recognises a path reads it.
FORMATS = (
    TokenFormat("litdata", "", is_litdata, read_litdata),
    TokenFormat("Megatron-LM", ".bin", is_megatron, read_megatron),
    TokenFormat("llm.c", ".bin", is_llm_c, read_llm_c),
    TokenFormat("raw", ".bin", lambda path: True, read_raw),
    TokenFormat("numpy", ".npy", is_numpy, read_numpy),
    TokenFormat("raw", ".npy", lambda path: True, read_raw),
)


def holds_tokens(path: Path) -> bool:
    """Return True if a named path holds tokens: a token file, litdata's folder, or a folder without text."""
    if not path.is_dir():
        return path.suffix.lower() in TOKEN_SUFFIXES
    if is_litdata(path):
        return True
    found = walk(path).keys()
    return bool(found & set(TOKEN_SUFFIXES)) and not found & {*TEXT_SUFFIXES, *TABLE_SUFFIXES}


def find_token_files(path: Path, token_dtype: str, field: str = "data.path") -> tuple[str, list[TokenFile]]:
    """Find the format and the files of a named path: a file, or a folder of files in the order of their paths.

    Args:
        path: the file or the folder.
        token_dtype: ``data.token_dtype``.
        field: field of the config that names the path.

    Raises:
        UsageError: no file of tokens, files of several formats, or one that is damaged.
    """
    if path.is_dir() and FORMATS[0].recognises(path):
        return FORMATS[0].name, FORMATS[0].read("", path, token_dtype)
    named = [(path.name, path)] if path.suffix.lower() in TOKEN_SUFFIXES else []
    if path.is_dir():
        found = walk(path)
        named = sorted((file.key, file.path) for suffix in (".bin", ".npy") for file in found.get(suffix, ()))
    files: dict[str, list[TokenFile]] = {}
    for key, file in named:
        # An index stands for the file that it describes.
        file = file.with_suffix(".bin") if file.suffix.lower() == ".idx" else file
        kind = next(one for one in FORMATS if one.suffix == file.suffix.lower() and one.recognises(file))
        files.setdefault(kind.name, []).extend(kind.read(key, file, token_dtype))
    if not files:
        raise UsageError(f"{field}: {str(path)!r} holds no {'/'.join(TOKEN_SUFFIXES)} files; name some")
    if len(files) > 1:
        raise UsageError(f"{field}: {str(path)!r} holds token files of {' and '.join(files)}; name those of one kind")
    return next(iter(files.items()))
