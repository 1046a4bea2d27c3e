"""What a run reads, for a person: its sources, and samples in words with the borders of their documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ..batch_ramp import BatchSizes
from ..batches import MicroBatches
from ..packing.borders import PADDING
from ..prepare import PreparedData
from ..streaming.streamed_batches import StreamedBatches, StreamSource
from ..tokenizer import TextTokenizer
from .mixture import Mixture

#: Between two documents of a sample.
BORDER = "‖"


def source_facts(data: PreparedData, n_samples: int) -> list[dict[str, Any]]:
    """Of every source: its training tokens and documents, its bytes per token, and what the first ``n_samples`` of the
    run read of it. JSON-able; what is not known is None."""
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
    """The whole batch of optimizer step ``step``, counted from 1, as a run's steps get it: int64 ``[B, T+1]``."""
    if isinstance(data.train, StreamSource):
        # Where streams stand is known by reading up to there.
        streamed = StreamedBatches(data.train, sizes=sizes, micro_batch_size=sizes.global_batch_size)
        try:
            return next(islice(streamed, step - 1, None)).numpy()
        finally:
            streamed.close()
    batches = MicroBatches(data.train, first_step=step - 1, sizes=sizes, micro_batch_size=sizes.size(step - 1))
    return next(iter(batches)).numpy()


def first_samples(data: PreparedData, sizes: BatchSizes, n: int) -> np.ndarray:
    """The first ``n`` samples of a run: int64 ``[n, T+1]``."""
    parts, step = [step_batch(data, sizes, 1)], 1
    while sum(map(len, parts)) < n:
        step += 1
        parts.append(step_batch(data, sizes, step))
    return np.concatenate(parts)[:n]


def described(data: PreparedData, first: int, samples_BT: np.ndarray) -> list[dict[str, Any]]:
    """Samples ``first`` and on of a run in words. JSON-able.

    Each has its global index, its source with its number and epoch there, the places of tokens after which a document
    ends, and its text, in which `BORDER` stands for those; padding is left out.
    """
    text_of, end = _decoder(data)
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
        borders = [place for place, token in enumerate(ids) if token == end]
        found.append(
            {
                "sample": index,
                "source": names[source],
                "number": number,
                "epoch": None if train.n_samples is None else number // train.n_samples,
                "borders": borders,
                "text": _marked(ids, borders, text_of),
            }
        )
    return found


def _decoder(data: PreparedData) -> tuple[Callable[[Sequence[int]], str], int | None]:
    """What makes text of tokens, and the token that ends a document."""
    if data.tokenizer_path is None:
        return (lambda ids: "".join(data.token_texts(ids))), None
    tokenizer = TextTokenizer.load(data.tokenizer_path)
    return tokenizer.decode, tokenizer.end_of_text


def _marked(ids: Sequence[int], borders: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> str:
    starts, ends = [0, *(border + 1 for border in borders)], [*borders, len(ids)]
    pieces = (ids[start:end] for start, end in zip(starts, ends, strict=True))
    return BORDER.join(text_of([token for token in piece if token != PADDING]) for piece in pieces)
