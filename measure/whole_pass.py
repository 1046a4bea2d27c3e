"""One forward pass over a probe, shown to an observer: its interface, and the pass of a model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RunError
from ..metrics.sinks import KeySummer
from ..models.attention.document_mask import Documents
from ..models.attention.weight_reader import read_weights
from ..models.decoder import Decoder
from ..models.tensor_shards import compute_dtype
from .config import BATCH_SIZE
from .foreign import ForeignModel
from .observed import device_of
from .observer import MetricObserver
from .ranks import own_batches

#: On a GPU: tokens of one pass, whose kernels then last longer than their launch; and hidden activations of a block's
#: MLP, 512 MiB in float32, which bound them in wide models.
_TOKENS, _ACTIVATIONS = 1 << 16, 1 << 27


def sequences_of_pass(batch_size: int | None, seq_len: int, d_ff: int, *, on_gpu: bool) -> int:
    """Return the number of sequences in one pass: ``batch_size``, or a number that suits the device."""
    if batch_size is not None:
        return batch_size
    return max(min(_TOKENS, _ACTIVATIONS // max(d_ff, 1)) // seq_len, 1) if on_gpu else BATCH_SIZE


class Batches:
    """This rank's part of a probe ``[N, T]`` (or of arrays beside it, ``[N, 2, T]``) in batches on the model's device,
    each with a flag that says if it counts.
    """

    def __init__(self, model: nn.Module, probe_NT: np.ndarray, batch_size: int) -> None:
        self.device = device_of(model)
        self.parts = own_batches(torch.from_numpy(np.ascontiguousarray(probe_NT)), batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        return ((part.to(self.device), counts) for part, counts in self.parts)


class ProbePass(Protocol):
    """Way of passing a probe through a model and showing it to an observer."""

    by_block: bool
    """True if all batches pass a block before any passes the next; it then calls `passed` itself."""

    def __call__(
        self, observer: MetricObserver, probe_NT: np.ndarray, batch_size: int, documents_NT: np.ndarray | None = None
    ) -> None:
        """Show all of the pass; weights are read within `read_weights`."""


class WholePass:
    """Pass of a model that is in memory: each batch goes through all of it."""

    by_block = False

    def __init__(self, model: Decoder | ForeignModel) -> None:
        self.model = model

    def __call__(
        self, observer: MetricObserver, probe_NT: np.ndarray, batch_size: int, documents_NT: np.ndarray | None = None
    ) -> None:
        """See :class:`ProbePass`."""
        if documents_NT is None:
            for tokens_BT, counts in Batches(self.model, probe_NT, batch_size):
                self._show(observer, tokens_BT, counts=counts)
            return
        for both_B2T, counts in Batches(self.model, np.stack([probe_NT, documents_NT], 1), batch_size):
            self._show(observer, *both_B2T.unbind(1), counts=counts)

    def _show(
        self, observer: MetricObserver, tokens_BT: Tensor, documents_BT: Tensor | None = None, *, counts: bool
    ) -> None:
        apart = documents_BT is not None and documents_apart(self.model)
        more = {"documents_BT": documents_BT} if apart else {}
        with batch_shown(observer, tokens_BT, documents_BT):
            logits_BV = self.model(tokens_BT, last_only=True, observer=observer if counts else None, **more)
        if counts:
            observer.logits(logits_BV)


def documents_apart(model: Decoder | ForeignModel) -> bool:
    """Return True if a model sees each document alone; for others, sinks at the beginnings of documents are
    measured.
    """
    return isinstance(model, Decoder) and model.config.attention.documents


@contextmanager
def batch_shown(observer: MetricObserver, tokens_BT: Tensor, documents_BT: Tensor | None) -> Iterator[None]:
    """Give the observer, within the context, the batch and, for sequences of several documents, the first positions of
    the documents.
    """
    observer.tokens_BT = tokens_BT
    if documents_BT is None:
        yield
        return
    observer.first_BT = Documents.of(documents_BT).first_positions()
    with read_weights(partial(KeySummer, first_BT=observer.first_BT)):
        yield


def not_finite(place: str, model: Decoder | ForeignModel) -> RunError:
    """Make the error that ends the measurement of a broken model, or of one whose numbers do not fit into its dtype."""
    mend = ""
    if compute_dtype(model) == torch.float16:
        mend = f"; float16 ends at {torch.finfo(torch.float16).max:.0f}: measure it in bfloat16 or float32"
    return RunError(f"the model gives NaN or inf, first in {place}{mend}")
