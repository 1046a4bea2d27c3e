"""Inputs for measurements of a model (definitions §2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from .batches import uniforms
from .config import DataConfig
from .corpora import Corpus, open_corpus
from .encode import beginning, stream_chunks
from .fetching import localised
from .mixture import InTurn
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from .batches import BatchSource


def random_probe(
    vocab_size: int, n_sequences: int, seq_len: int, probe_seed: int, ids: np.ndarray | None = None
) -> np.ndarray:
    """Draw ``n_sequences`` rows of ``seq_len`` tokens, uniform over the whole vocabulary; int64 ``[N, T]``.

    The stream's name contains the word ``probe``, so no data or init seed shares numbers with it. All models of one
    vocabulary get the same rows, and the first rows of a larger probe are the rows of a smaller one.

    Args:
        vocab_size: V.
        n_sequences: N.
        seq_len: T.
        probe_seed: seed of the tokens.
        ids: draw only from these (`text_ids`).
    """
    u_NT = uniforms("probe", probe_seed, first=0, shape=(n_sequences, seq_len))
    if ids is None:
        return (u_NT * vocab_size).astype(np.int64)
    return ids[(u_NT * len(ids)).astype(np.int64)]


def text_ids(tokenizer: TextTokenizer | None, vocab_size: int) -> np.ndarray | None:
    """List the ids below ``vocab_size`` for which a tokenizer has a token, special ones included; int64, rising.

    Embedding tables are often padded with rows that no text reads. Returns None without a tokenizer, or if it has all
    ids.
    """
    if tokenizer is None:
        return None
    ids = tokenizer.ids[tokenizer.ids < vocab_size]
    return ids if 0 < len(ids) < vocab_size else None


#: Sequences of a control: enough for a mean over heads.
N_CONTROLS = 32


def bos_controls(tokenizer: TextTokenizer, random_NT: np.ndarray, text_NT: np.ndarray | None) -> dict[str, np.ndarray]:
    """Build probes that separate a sink on the first position from one on BOS (definitions §2), int64 ``[N, T]`` by
    name.

    ``bos``: random tokens behind BOS, or behind all tokens that the tokenizer puts before a text. ``text_without_bos``:
    the text without it, if the tokenizer puts it there. Empty if the tokenizer has no BOS.

    Args:
        tokenizer: the model's tokenizer.
        random_NT: the random probe.
        text_NT: the text probe, if there is one.
    """
    if tokenizer.bos is None:
        return {}
    first = np.array(tokenizer.before_text or [tokenizer.bos], dtype=np.int64)
    n, found = len(first), {}
    if random_NT.shape[1] > n:
        drawn_NT = random_NT[:N_CONTROLS, :-n]
        found["bos"] = np.concatenate([np.tile(first, (len(drawn_NT), 1)), drawn_NT], axis=1)
    begins = text_NT is not None and text_NT.shape[1] > n + 1 and bool((text_NT[:, :n] == first).all())
    if text_NT is not None and begins:
        found["text_without_bos"] = text_NT[:N_CONTROLS, n:]
    return found


def text_probe(
    val: BatchSource, n_sequences: int, seq_len: int, *, n_before: int = 0, fewest: int | None = None
) -> np.ndarray:
    """Take the beginnings of the first ``n_sequences`` validation samples, each once; int64 ``[N, T]``.

    If samples are padded, the text of the next one replaces the padding, and the next sequence begins with the sample
    after: leaving padded samples out would leave only long documents.

    Args:
        val: the samples.
        n_sequences: N.
        seq_len: T.
        n_before: tokens before the text of every sample, such as BOS.
        fewest: smallest number of sequences that is enough where there are fewer than N; by default N.

    Raises:
        UsageError: the validation text has fewer samples, or shorter ones. A sample shown twice would count as
            agreement between sequences.
    """
    if seq_len > val.seq_len:
        raise UsageError(
            f"text probe: sequences of {seq_len} tokens, but validation samples have {val.seq_len} "
            "(model.max_seq_len); ask for shorter sequences"
        )
    found, is_padded, texts = [], False, _samples(val, n_sequences)
    for sample in texts:
        row = sample[:seq_len][sample[:seq_len] >= 0]
        is_padded |= len(row) < seq_len
        while len(row) < seq_len and (more := next(texts, None)) is not None:
            row = np.concatenate([row, more[n_before:][more[n_before:] >= 0]])[:seq_len]
        if len(row) == seq_len:
            found.append(row)
        if len(found) == n_sequences:
            return np.stack(found)
    if fewest is not None and len(found) >= fewest:
        return np.stack(found)
    what, mend = ("fills", " or shorter ones") if is_padded else ("holds", "")
    raise UsageError(
        f"text probe: {n_sequences} sequences, but the validation text of data.path {what} {len(found)} of {seq_len} "
        f"tokens; raise data.val_fraction, or ask for fewer{mend}"
    )


def _samples(val: BatchSource, at_once: int) -> Iterator[np.ndarray]:
    """Yield every different sample once."""
    for first in count(0, at_once):
        n = at_once if val.n_samples is None else min(at_once, val.n_samples - first)
        if n < 1:
            return
        samples_NT = val.batch(first, n)
        # A source that is shorter than others goes round.
        yield from samples_NT[val.is_first_round(first, n)] if isinstance(val, InTurn) else samples_NT


#: Characters that are read of a document for each token that is wanted of it: no tokenizer needs more.
_CHARS_PER_TOKEN = 32


def passage_probe(
    path: str | Sequence[str], tokenizer: TextTokenizer, n_sequences: int, seq_len: int, vocab_size: int
) -> np.ndarray:
    """Take passages of texts, each behind the tokens that the tokenizer puts before a text, such as BOS; int64 ``[N,
    T]``.

    They come from as many documents as possible, in the corpus' order: first the beginning of each document, then its
    next passage, and so on.

    Args:
        path: texts, as in ``data.path``.
        tokenizer: the model's tokenizer.
        n_sequences: passages.
        seq_len: tokens in each, those before the text included.
        vocab_size: vocabulary of the model.

    Raises:
        UsageError: too little text, or a token that the model does not have.
    """
    first = tokenizer.before_text
    length = seq_len - len(first)
    if length < 1:
        raise UsageError(
            f"text probe: sequences of {seq_len} tokens have no room behind {len(first)} special ones; give a larger "
            "seq_len"
        )
    if path == "backcopy":
        raise UsageError("text probe: the backcopy task has no text to read; give a file or folder")
    corpus = open_corpus(localised(DataConfig(path=path if isinstance(path, str) else list(path))))
    found: list[np.ndarray] = []
    for of_each in (1, 16, n_sequences):
        found = _passages(corpus, tokenizer, n_sequences, length, of_each)
        if len(found) == n_sequences:
            break
    else:
        raise UsageError(
            f"text probe: {path} has {len(found)} different passages of {length} tokens, and {n_sequences} are asked "
            "for; give more text, fewer sequences or shorter ones"
        )
    probe_NT = np.array([[*first, *passage] for passage in found], dtype=np.int64)
    if (largest := int(probe_NT.max())) >= vocab_size:
        raise UsageError(f"text probe: the tokenizer gives token {largest}, the model has {vocab_size}; give its own")
    return probe_NT


def _passages(corpus: Corpus, tokenizer: TextTokenizer, n: int, length: int, of_each: int) -> list[np.ndarray]:
    """Take at most ``n`` different passages of ``length`` tokens, at most ``of_each`` from each document."""
    by_document: list[list[np.ndarray]] = []
    beginnings: set[bytes] = set()
    for document in corpus.documents():
        chunks = stream_chunks([beginning(document, _CHARS_PER_TOKEN * length * of_each)], shorten=True)
        ids = np.concatenate(tokenizer.encode(list(chunks)))[: of_each * length]
        if whole := [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]:
            by_document.append(whole)
            beginnings.add(whole[0].tobytes())
        if len(beginnings) == n:
            break
    # One passage shown twice would count as agreement between sequences: files share licences and headers.
    turns = (passage for turn in zip_longest(*by_document) for passage in turn if passage is not None)
    return list({passage.tobytes(): passage for passage in turns}.values())[:n]
