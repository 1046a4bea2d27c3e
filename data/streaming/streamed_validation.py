"""Validation text of a streamed set: the first documents, by their hash, that training leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UsageError
from ...schema import Count
from ..batches import ShardedTokens
from ..cache import Meta, build_once, facts_of_files, fingerprint
from ..encode import Document, encode_documents
from ..tokenizer import TextTokenizer
from .stream import is_held_out
from .streamed_table import StreamedTable

_FORMAT = 2
_TOKENS = "val-00000.bin"


class HeldOutMeta(Meta):
    """``meta.json`` of held-out documents."""

    n_documents: Count
    n_tokens: Count
    n_bytes: Count


def held_out(
    table: StreamedTable, tokenizer: TextTokenizer, n_documents: int, val_fraction: float, cache_dir: Path, verify: str
) -> tuple[ShardedTokens, dict[str, Any]]:
    """Return the tokens of the first ``n_documents`` whose hash is below ``val_fraction``, and `HeldOutMeta`.

    They are read once and kept in ``cache_dir``.

    Raises:
        UsageError: there is no such document.
    """
    key = fingerprint(
        format=_FORMAT,
        identity=table.identity(),
        tokenizer_hash=tokenizer.sha256,
        n_documents=n_documents,
        val_fraction=val_fraction,
    )

    def documents() -> Iterator[Document]:
        left = n_documents
        for file in range(table.n_files):
            for text in table.texts(file):
                if text and is_held_out(text, val_fraction):
                    yield Document("val", text)
                    left -= 1
                    if not left:
                        return

    def build(scratch: Path) -> dict[str, Any]:
        found = list(encode_documents(documents(), tokenizer))
        if not found:
            raise UsageError(
                f"data.val_fraction: {val_fraction} holds out none of the documents of {table.path!r}; give more"
            )
        ids = np.concatenate([one.ids for one in found])
        ids.astype("<u4").tofile(scratch / _TOKENS)
        return {
            "n_documents": len(found),
            "n_tokens": len(ids),
            "n_bytes": sum(one.n_bytes for one in found),
            "files": facts_of_files(scratch),
        }

    folder = cache_dir / f"heldout-{key[:16]}"
    meta = build_once(folder, build, verify, HeldOutMeta)
    return ShardedTokens([folder / _TOKENS], "<u4"), meta
