"""Passes over a probe, shown to an observer: whole, or with one block of the model in memory at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError, UsageError
from ..files import user_path
from ..messages import one_line
from ..metrics.activation_sums import ActivationSums
from ..metrics.sinks import KeySummer
from ..models.attention.document_mask import Documents
from ..models.attention.weight_reader import read_weights
from ..models.by_block import DecoderByBlock
from ..models.decoder import Decoder
from ..models.observe import Attended, Observer, Site, Sublayer
from ..models.tensor_shards import compute_dtype
from .config import BATCH_SIZE
from .hf import HFModel
from .observed_metrics import PLACES, AttentionView, Observed, Place
from .ranks import batches_of_rank, sum_over_ranks, world_size

_SITES = {
    "attention": "the residual stream after the attention of block {}",
    "heads": "the queries, keys, values or outputs of the attention of block {}",
    "neurons": "the hidden activations of the MLP of block {}",
    "mlp": "the residual stream after the MLP of block {}",
}


class FiniteWatch:
    """Record of the places of a forward pass that showed NaN or inf. Queries the device only at the end."""

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.n_layers = n_layers
        self.names = {("embedding", 0): "the embeddings"}
        for layer in range(1, n_layers + 1):
            for site in ("heads", "attention", "neurons", "mlp"):
                self.names[site, layer] = _SITES[site].format(layer)
        self.names["logits", n_layers] = "the logits"
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.totals = {name: [zero] for name in self.names}

    def see(self, site: str, layer: int, x: Tensor) -> None:
        """Check a tensor, or sums over it: NaN and inf survive every sum. One read, no copy."""
        self.totals[site, layer].append(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)))

    def first(self, *, everywhere: bool = False) -> str | None:
        """Name the first place of the pass that showed any, on this or any rank; None if all was finite."""
        broken = torch.stack([~torch.stack(totals).isfinite().all() for totals in self.totals.values()])
        shown = (sum_over_ranks(broken.int()) if everywhere else broken).tolist()
        return next((name for name, broken in zip(self.names.values(), shown, strict=True) if broken), None)


class MetricObserver:
    """Observer that shows every place of a pass to the metrics that read it, in their order.

    Args:
        metrics: the metrics.
        finite: looks at all tensors first; None where nothing watches for NaN.
    """

    def __init__(self, metrics: Sequence[Observed], finite: FiniteWatch | None = None) -> None:
        self.finite = finite
        self.first_BT: Tensor | None = None
        """First position of each position's document in the batch; None if each sequence counts as one."""
        self.tokens_BT: Tensor | None = None
        """The batch that passes."""
        self.metrics = metrics
        self.hooks = {
            place: [(hook, m.takes_sums) for m in metrics if (hook := m.hook(place)) is not None] for place in PLACES
        }

    def _show(self, place: Place, *shown: Any) -> None:
        for hook, takes_sums in self.hooks[place]:
            hook(*(x.x_BTD if isinstance(x, ActivationSums) and not takes_sums else x for x in shown))

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        sums = ActivationSums(h_BTD)
        if self.finite is not None:
            # Squares of finite states may overflow: all directions would be zeros.
            self.finite.see(site, layer, sums.norm)
        self._show("residual", site, layer, sums)

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        view = AttentionView(**vars(attended), first_BT=self.first_BT, tokens_BT=self.tokens_BT)
        if self.finite is not None:
            # Fused kernels may give finite outputs for queries that are not. Values that are not make outputs that are
            # not.
            for x in (view.query_sums.total_HK, view.k_BHTK, view.out_BHTK):
                self.finite.see("heads", layer, x)
        self._show("attention", layer, view)

    def sublayer(self, site: Sublayer, layer: int, x_BTD: Tensor) -> None:
        """See models/observe.py."""
        self._show("sublayer", site, layer, ActivationSums(x_BTD))

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""
        sums = ActivationSums(a_BTF)
        if self.finite is not None:
            self.finite.see("neurons", layer, sums.first_size)
            self.finite.see("neurons", layer, sums.later_size)
        self._show("neurons", layer, sums)

    def routing(self, layer: int, chosen_BTK: Tensor) -> None:
        """See models/observe.py."""
        self._show("routing", layer, chosen_BTK)

    def expert_units(self, layer: int, expert: int, a_RF: Tensor, position_R: Tensor) -> None:
        """See models/observe.py."""
        self._show("expert_units", layer, expert, a_RF, position_R)

    def logits(self, logits_BV: Tensor) -> None:
        """Show the last-position logits of a batch, at the end of its pass."""
        if self.finite is not None:
            self.finite.see("logits", self.finite.n_layers, logits_BV)
        self._show("logits", logits_BV)

    def passed(self, layer: int) -> None:
        """See :class:`Observed`."""
        for metric in self.metrics:
            metric.passed(layer)


# ---------------------------------------------------------------- one forward pass over a probe, shown to an observer
# Its interface, and the pass of a model in memory.

#: On a GPU: tokens of one pass, whose kernels then last longer than their launch; and hidden activations of a block's
#: MLP, 512 MiB in float32, which bound them in wide models.
_TOKENS, _ACTIVATIONS = 1 << 16, 1 << 27


def sequences_of_pass(batch_size: int | None, seq_len: int, d_ff: int, *, on_gpu: bool) -> int:
    """Return the number of sequences in one pass: ``batch_size``, or a number that suits the device."""
    if batch_size is not None:
        return batch_size
    return max(min(_TOKENS, _ACTIVATIONS // max(d_ff, 1)) // seq_len, 1) if on_gpu else BATCH_SIZE


def _sequences(model: Decoder | HFModel, probe_NT: np.ndarray, batch_size: int | None) -> int:
    on_gpu = model.device.type == "cuda"
    return sequences_of_pass(batch_size, probe_NT.shape[1], model.config.ff, on_gpu=on_gpu)


class Batches:
    """This rank's part of a probe ``[N, T]`` (or of arrays beside it, ``[N, 2, T]``) in batches on the model's device,
    each with a flag that says if it counts.
    """

    def __init__(self, model: Decoder | HFModel, probe_NT: np.ndarray, batch_size: int) -> None:
        self.device = model.device
        self.parts = batches_of_rank(torch.from_numpy(np.ascontiguousarray(probe_NT)), batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        return ((part.to(self.device), counts) for part, counts in self.parts)


class ProbePass(Protocol):
    """Way of passing a probe through a model and showing it to an observer."""

    by_block: bool
    """True if all batches pass a block before any passes the next; it then calls `passed` itself."""

    def __call__(
        self,
        observer: MetricObserver,
        probe_NT: np.ndarray,
        batch_size: int | None = None,
        documents_NT: np.ndarray | None = None,
    ) -> None:
        """Show all of the pass; weights are read within `read_weights`. By default ``batch_size`` suits the device."""


class WholePass:
    """Pass of a model that is in memory: each batch goes through all of it."""

    by_block = False

    def __init__(self, model: Decoder | HFModel) -> None:
        self.model = model

    def __call__(
        self,
        observer: MetricObserver,
        probe_NT: np.ndarray,
        batch_size: int | None = None,
        documents_NT: np.ndarray | None = None,
    ) -> None:
        """See :class:`ProbePass`."""
        batch_size = _sequences(self.model, probe_NT, batch_size)
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
        with showing_batch(observer, tokens_BT, documents_BT):
            logits_BV = self.model(tokens_BT, last_only=True, observer=observer if counts else None, **more)
        if counts:
            observer.logits(logits_BV)


def documents_apart(model: Decoder | HFModel) -> bool:
    """Return True if a model sees each document alone; for others, sinks at the beginnings of documents are
    measured.
    """
    return isinstance(model, Decoder) and model.config.attention.documents


@contextmanager
def showing_batch(observer: MetricObserver, tokens_BT: Tensor, documents_BT: Tensor | None) -> Iterator[None]:
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


def not_finite(place: str, model: Decoder | HFModel) -> RunError:
    """Make the error that ends the measurement of a broken model, or of one whose numbers do not fit into its dtype."""
    mend = ""
    if compute_dtype(model) == torch.float16:
        mend = f"; float16 ends at {torch.finfo(torch.float16).max:.0f}: measure it in bfloat16 or float32"
    return RunError(f"the model gives NaN or inf, or states too large for a norm, first in {place}{mend}")


# ---------------------------------------------------------------- storage of a probe's hidden states between two blocks
# In memory, or in a file.

#: Bytes of hidden states that are kept in memory; more need a folder for a file.
IN_MEMORY = 1 << 30


@contextmanager
def kept_states(shape: tuple[int, int, int], dtype: torch.dtype, scratch: str | Path | None) -> Iterator[Tensor]:
    """Allocate hidden states ``[N, T, D]`` on the CPU; above 1 GiB in a temporary file in ``scratch``.

    Raises:
        UsageError: more than 1 GiB without a folder, or ``scratch`` is not a folder.
        RunError: the disk has no room for the file.
    """
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if n_bytes <= IN_MEMORY:
        yield torch.empty(shape, dtype=dtype)
        return
    size = f"{n_bytes / 2**30:.1f} GiB"
    if scratch is None:
        raise UsageError(
            f"the hidden states of {shape[0]} sequences of {shape[1]} tokens take {size}, and --stream keeps "
            f"{IN_MEMORY / 2**30:.3g} GiB in memory: give --scratch DIR, or fewer sequences"
        )
    folder = user_path(scratch)
    try:
        file = tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-states-")  # noqa: SIM115, closed below
    except OSError as error:
        raise UsageError(f"--scratch {folder}: {one_line(error.strerror)}; give a folder to write in") from None
    with file:
        try:
            # A mapped file without room behind it would end the process when it is written into.
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            raise RunError(f"--scratch {folder}: no room for {size} ({one_line(error.strerror)})") from None
        yield torch.from_file(file.name, shared=True, size=n_bytes // dtype.itemsize, dtype=dtype).view(shape)


# ---------------------------------------------------------------- pass by block
# Measurement passes of a probe through a decoder with one block at a time in memory.


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
        self,
        observer: MetricObserver,
        probe_NT: np.ndarray,
        batch_size: int | None = None,
        documents_NT: np.ndarray | None = None,
    ) -> None:
        """See ``ProbePass``.

        Raises:
            RunError: a place has NaN or inf; the blocks after it are not read.
            UsageError: the hidden states need a scratch folder.
        """
        if world_size() > 1:
            raise ValueError("a pass by block is one process's")
        batch_size = _sequences(self.decoder, probe_NT, batch_size)
        decoder, tokens_NT = self.decoder, torch.from_numpy(np.ascontiguousarray(probe_NT))
        documents = None if documents_NT is None else torch.from_numpy(np.ascontiguousarray(documents_NT))

        @contextmanager
        def watch(sequences: slice) -> Iterator[Observer]:
            numbers = None if documents is None else documents[sequences].to(decoder.device)
            with showing_batch(observer, tokens_NT[sequences].to(decoder.device), numbers):
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


def pass_of(model: Decoder | HFModel) -> ProbePass:
    """Return the pass that suits a model."""
    return PassByBlock(model) if isinstance(model, DecoderByBlock) else WholePass(model)
