"""Measurement passes of a probe through a decoder with one block at a time in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ...models.by_block.decoder_by_block import DecoderByBlock
from ...models.observe import Observer
from ..observer import MetricObserver
from ..ranks import world_size
from ..whole_pass import batch_shown, documents_apart, not_finite
from .kept_states import kept_states


def batches_of(n_sequences: int, batch_size: int) -> list[slice]:
    """Split sequences into batches that pass together."""
    return [slice(first, min(first + batch_size, n_sequences)) for first in range(0, n_sequences, batch_size)]


class PassByBlock:
    """Pass in which all batches pass one block before any passes the next.

    Args:
        decoder: decoder whose blocks come one at a time.
    """

    by_block = True

    def __init__(self, decoder: DecoderByBlock) -> None:
        self.decoder = decoder

    def __call__(
        self, observer: MetricObserver, probe_NT: np.ndarray, batch_size: int, documents_NT: np.ndarray | None = None
    ) -> None:
        """See ``ProbePass``.

        Raises:
            RunError: a place has NaN or inf; the blocks after it are not read.
            UsageError: the hidden states need a scratch folder.
        """
        if world_size() > 1:
            raise ValueError("a pass by block is one process's")
        decoder, tokens_NT = self.decoder, torch.from_numpy(np.ascontiguousarray(probe_NT))
        documents = None if documents_NT is None else torch.from_numpy(np.ascontiguousarray(documents_NT))

        @contextmanager
        def watch(sequences: slice) -> Iterator[Observer]:
            numbers = None if documents is None else documents[sequences].to(decoder.device)
            with batch_shown(observer, tokens_NT[sequences].to(decoder.device), numbers):
                yield observer

        def passed(layer: int) -> None:
            if observer.finite is not None and (place := observer.finite.first()) is not None:
                raise not_finite(place, decoder)
            observer.passed(layer)

        shape = (*tokens_NT.shape, decoder.config.d_model)
        batches = batches_of(len(tokens_NT), batch_size)
        with kept_states(shape, decoder.dtype, decoder.streaming.scratch) as states_NTD:
            decoder.pass_blocks(
                tokens_NT,
                states_NTD,
                batches,
                watch=watch,
                documents_NT=documents if documents_apart(decoder) else None,
                passed=passed,
            )
            for logits in decoder.logits(states_NTD[:, -1].clone()):
                for batch in batches_of(len(logits), batch_size):
                    observer.logits(logits[batch])
