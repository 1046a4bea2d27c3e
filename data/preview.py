"""Data of a run in readable form: its sources, and samples in words with the borders of their documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from .batch_sizes import BatchSizes
from .mixture import Mixture
from .packing import PADDING, Layout
from .prepare import PreparedData
from .process_batches import MicroBatches, StreamedBatches, StreamSource
from .tokenizer import TextTokenizer

#: Behind the end of a document of a sample, and in place of a BOS.
BORDER, BOS = "‖", "⊢"
#: Value behind a sample's last token: no token.
_BEHIND = 1 << 62


def source_facts(data: PreparedData, n_samples: int) -> list[dict[str, Any]]:
    """Return for every source its training tokens and documents, its bytes per token, and the amount that the first
    ``n_samples`` of the run read of it. JSON-able; unknown values are None.
    """
    epochs = data.epochs(n_samples)
    seq_len = data.train.seq_len
    shares = {"": 1.0} if data.mixture is None else data.mixture.shares
    tokens = {"": n_samples * seq_len} if data.mixture is None else data.tokens_by_source(n_samples * seq_len)
    found = []
    for name, share in shares.items():
        facts = data.record["sources"][name] if name else data.record
        found.append(
            {
                "name": name,
                "kind": facts["kind"],
                "share": share,
                "documents": facts.get("documents", {}).get("train"),
                "tokens": facts.get("tokens", {}).get("train"),
                "bytes_per_token": facts["bytes_per_token"],
                "tokens_read": tokens[name],
                "epochs": epochs.get(name),
            }
        )
    return found


def step_batch(data: PreparedData, sizes: BatchSizes, step: int) -> np.ndarray:
    """Return the whole batch of optimizer step ``step``, counted from 1, in the form that a run's steps get it: int64
    ``[B, T+1]``.
    """
    if isinstance(data.train, StreamSource):
        # The position of a stream is only found by reading up to there.
        streamed = StreamedBatches(data.train, sizes=sizes, micro_batch_size=sizes.global_batch_size)
        try:
            return next(islice(streamed, step - 1, None)).numpy()
        finally:
            streamed.close()
    batches = MicroBatches(data.train, first_step=step - 1, sizes=sizes, micro_batch_size=sizes.size(step - 1))
    return next(iter(batches)).numpy()


def first_samples(data: PreparedData, sizes: BatchSizes, n: int) -> np.ndarray:
    """Return the first ``n`` samples of a run: int64 ``[n, T+1]``."""
    parts, step = [step_batch(data, sizes, 1)], 1
    while sum(map(len, parts)) < n:
        step += 1
        parts.append(step_batch(data, sizes, step))
    return np.concatenate(parts)[:n]


def described(data: PreparedData, first: int, samples_BT: np.ndarray) -> list[dict[str, Any]]:
    """Describe samples ``first`` and on of a run in words. JSON-able.

    Each has its global index, its source with its number and epoch there, the places of tokens after which a document
    ends, and its text, in which `BORDER` stands for the tokens that end documents and `BOS` for those that open
    sequences or documents; padding is left out. Documents are those that the model would separate.
    """
    text_of = _decoder(data)
    index_B = np.arange(first, first + len(samples_BT))
    names, source_B, number_B = [""], np.zeros_like(index_B), index_B
    if data.mixture is not None:
        names = list(data.mixture.names)
        source_B, number_B = data.mixture.places(index_B)
    found = []
    columns = (x.tolist() for x in (index_B, source_B, number_B, samples_BT))
    for index, source, number, ids in zip(*columns, strict=True):
        train = data.train.sources[names[source]] if isinstance(data.train, Mixture) else data.train
        ids = [token for token in ids if token != PADDING]
        layout = data.layouts.get(names[source])
        borders = _document_ends(ids, layout)
        found.append(
            {
                "sample": index,
                "source": names[source] or data.record["path"],
                "number": number,
                "epoch": None if train.n_samples is None else number // train.n_samples,
                "borders": borders,
                "text": _marked(ids, borders, layout, text_of),
            }
        )
    return found


def _decoder(data: PreparedData) -> Callable[[Sequence[int]], str]:
    """Return a function from tokens to text."""
    if data.tokenizer_path is None:
        return lambda ids: "".join(data.token_texts(ids))
    return TextTokenizer.load(data.tokenizer_path).decode


def _document_ends(ids: Sequence[int], layout: Layout | None) -> list[int]:
    """Return the last position of each document that ends in a sample."""
    if layout is None or layout.borders is None:
        return []
    documents_T = layout.borders.documents(torch.tensor([[*ids, _BEHIND]]))[0].tolist()
    return [place for place, (here, behind) in enumerate(pairwise(documents_T)) if here != behind]


def _marked(
    ids: Sequence[int], borders: Sequence[int], layout: Layout | None, text_of: Callable[[Sequence[int]], str]
) -> str:
    """Return text with `BORDER` behind each document, and `BOS`."""
    bos = None if layout is None or layout.bos == "none" else layout.bos_token
    pieces = []
    for start, stop in pairwise([0, *(border + 1 for border in borders), len(ids)]):
        piece, opening = list(ids[start:stop]), ""
        if piece and piece[0] == bos and (start == 0 or (layout is not None and layout.bos == "document")):
            piece, opening = piece[1:], BOS
        if layout is not None and stop - 1 in borders and piece and piece[-1] == layout.end_token:
            piece.pop()
        pieces.append(opening + text_of(piece))
    return BORDER.join(pieces)
