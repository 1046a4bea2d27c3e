"""A corpus that fits into a bag: English technical prose as compressed tokens, for a machine without a network.

    python research/sink_at_60m/corpus.py pack TEXTS FOLDER [--tokens N]    # where the text is
    python research/sink_at_60m/corpus.py unpack FOLDER OUT                 # where it is trained on

``TEXTS`` is any folder of ``.txt``, ``.rst``, ``.html`` and ``.pod`` files, also in ``.gz``. The study read the RFCs
and manuals of Debian 12: the packages doc-rfc-*, linux-doc-6.1, python3.11-doc, postgresql-doc-15, perl-doc, git-doc
and vim-doc, unpacked with ``dpkg -x``. Documents are shuffled, so that any number of tokens is a sample of all.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import lzma
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from birthmark.data.tokenizer import TextTokenizer, train_bpe
from birthmark.files import atomic_path

_SUFFIXES = (".txt", ".rst", ".html", ".pod")
_SHORTEST = 500  # characters: licences and stubs
_VOCABULARY, _PIECES = 8192, 8
#: Characters of the text that the tokenizer is trained on, and of one document there.
_SAMPLE, _OF_ONE = 60_000_000, 20_000
#: Tokens are 16-bit numbers: the matcher's contexts are aligned to two bytes.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 26, "lc": 0, "lp": 1, "pb": 1}]


def plain_text(file: Path) -> str:
    """Read a document: the text of HTML, the lines of an RFC without page headers, footers and contents."""
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
    if ".html" in file.suffixes:
        text = re.sub(r"(?s)<(script|style|head|nav).*?</\1>", "", text)
        text = re.sub(r"<(p|div|br|li|h\d|tr|dt|dd|pre)[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
    lines = [
        line.lstrip("\f").removeprefix("   ").rstrip()
        for number, line in enumerate(text.split("\n"))
        if not re.search(r"\[Page\s+[\divxl]+\]\s*$", line)
        and not re.search(r"\. ?(\. ?){4,}\s*\d*\s*$", line)
        and not (number > 60 and re.match(r"\f?(RFC|BCP)\s?:?\s?\d+ .*(19|20)\d\d\s*$", line))
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def documents(folder: Path) -> list[str]:
    """Read all documents below a folder, each once, in an order that does not depend on their places."""
    files = sorted(file for file in folder.rglob("*") if {*file.suffixes} & {*_SUFFIXES} and file.is_file())
    with ProcessPoolExecutor() as processes:
        texts = list(processes.map(plain_text, files, chunksize=64))
    by_digest = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts if len(text) > _SHORTEST}
    found = [by_digest[digest] for digest in sorted(by_digest)]
    random.Random(0).shuffle(found)
    return found


def tokens_of(texts: list[str], tokenizer: TextTokenizer, n_tokens: int) -> np.ndarray:
    """Encode documents until there are ``n_tokens``: uint16, each document with its end-of-text token behind it."""
    end = tokenizer.end_of_text
    assert end is not None

    def pieces() -> Iterator[np.ndarray]:
        left = n_tokens
        for start in range(0, len(texts), 64):
            for ids in tokenizer.encode(texts[start : start + 64]):
                if left <= 0:
                    return
                yield (piece := np.append(ids, end).astype(np.uint16))
                left -= len(piece)

    return np.concatenate(list(pieces()))[:n_tokens]


def _write(path: Path, content: bytes) -> None:
    with atomic_path(path) as new:
        new.write_bytes(content)


def _compressed(piece: bytes) -> bytes:
    return lzma.compress(piece, format=lzma.FORMAT_XZ, filters=_FILTERS)


def pack(texts: Path, folder: Path, n_tokens: int) -> None:
    """Write ``tokenizer.json`` and the tokens, compressed in pieces that are opened side by side."""
    found, sample, size = documents(texts), [], 0
    for text in found:
        sample.append(text[:_OF_ONE])
        if (size := size + len(sample[-1])) > _SAMPLE:
            break
    tokenizer = train_bpe(sample, _VOCABULARY)
    tokens = tokens_of(found, tokenizer, n_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer.json", tokenizer.content)
    pieces = [piece.tobytes() for piece in np.array_split(tokens, _PIECES)]
    with ProcessPoolExecutor() as processes:
        for number, compressed in enumerate(processes.map(_compressed, pieces)):
            _write(folder / f"tokens-{number}.xz", compressed)
    print(f"{len(found)} documents, {sum(map(len, found)):,} characters; {len(tokens):,} tokens in {folder}")


def unpack(folder: Path, out: Path) -> None:
    """Write ``tokens.bin`` and ``tokenizer.json``, as configs of the study name them."""
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("tokens-*.xz"))
    with ProcessPoolExecutor(min(len(files), os.cpu_count() or 1)) as processes:
        _write(out / "tokens.bin", b"".join(processes.map(_opened, files)))
    _write(out / "tokenizer.json", (folder / "tokenizer.json").read_bytes())


def _opened(file: Path) -> bytes:
    return lzma.decompress(file.read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=float, default=72e6)
    given = parser.parse_args()
    if given.what == "pack":
        pack(given.source, given.folder, int(given.tokens))
    else:
        unpack(given.source, given.folder)
