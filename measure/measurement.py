"""One forward pass over a probe, read by every metric at once. Plain PyTorch: any loop can call it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RunError
from ..metrics.sinks import KeySummer
from ..models.attention.document_mask import Documents
from ..models.attention.weight_reader import read_weights
from ..models.decoder import Decoder
from ..models.tensor_shards import reshard
from .foreign import ForeignModel
from .observed import BirthReference, MetricSource, Setting
from .observer import FiniteWatch, MetricObserver
from .our_metrics import ObservedBirth, ObservedPreference, our_metrics
from .ranks import own_batches
from .summary import Measurement, summarise
from .user_metrics import Guarded, MetricLike, find_metrics, left_alone

__all__ = ["Batches", "BirthReference", "Measurement", "birth_reference", "evaluation_mode", "measure"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate without a trace: no gradients, no autocast, every module's mode put back as it was, and nothing kept of
    weights that were gathered."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device.type
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


class Batches:
    """This rank's part of a probe ``[N, T]`` (or of arrays beside it, ``[N, 2, T]``) in batches, on the model's device,
    and of each whether it counts."""

    def __init__(self, model: nn.Module, probe_NT: np.ndarray, batch_size: int) -> None:
        self.device = next(model.parameters()).device
        self.parts = own_batches(torch.from_numpy(np.ascontiguousarray(probe_NT)), batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        return ((part.to(self.device), counts) for part, counts in self.parts)


def birth_reference(model: Decoder | ForeignModel, probe_NT: np.ndarray, batch_size: int) -> BirthReference:
    """Seed direction and token preference of a newborn model, from one pass over the probe."""
    setting = Setting(model, probe_NT.shape[1])
    observer = MetricObserver([ObservedBirth(setting), ObservedPreference(setting)])
    # Weights are read, though nothing here needs their sums: then p̄ at birth is that of a measurement, bit for bit.
    with evaluation_mode(model), read_weights(KeySummer):
        _pass(model, Batches(model, probe_NT, batch_size), observer)
    return BirthReference(setting.alignment.compute().mean_direction, setting.preference.compute().mean_prob)


def _pass(model: Decoder | ForeignModel, batches: Batches, observer: MetricObserver) -> None:
    for tokens_BT, counts in batches:
        observer.tokens_BT = tokens_BT
        logits_BV = model(tokens_BT, last_only=True, observer=observer if counts else None)
        if counts:
            observer.logits(logits_BV)


def _pass_over_documents(model: Decoder | ForeignModel, batches: Batches, observer: MetricObserver) -> None:
    """The same of batches of tokens and of the numbers of their documents ``[B, 2, T]``."""
    # Models that take documents apart see each alone; of the others, sinks are looked for where documents begin.
    apart = isinstance(model, Decoder) and model.config.attention.documents
    for both_B2T, counts in batches:
        tokens_BT, documents_BT = both_B2T.unbind(1)
        observer.tokens_BT = tokens_BT
        first_BT = observer.first_BT = Documents.of(documents_BT).first_positions()
        more = {"documents_BT": documents_BT} if apart else {}
        with read_weights(partial(KeySummer, first_BT=first_BT)):
            logits_BV = model(tokens_BT, last_only=True, observer=observer if counts else None, **more)
        if counts:
            observer.logits(logits_BV)


def measure(
    model: Decoder | ForeignModel,
    probe_NT: np.ndarray,
    birth: BirthReference | None = None,
    strangers: list[BirthReference] | None = None,
    *,
    batch_size: int = 64,
    sink_epsilon: float = 0.3,
    metrics: Sequence[MetricLike | MetricSource] = (),
    documents_NT: np.ndarray | None = None,
) -> Measurement:
    """Every quantity of definitions §3–7, and of your own metrics, from one forward pass over a probe.

    The pass runs in the parameters' own precision; statistics are float32 inside a batch (float64 where the parameters
    are) and float64 across batches. In a process group every rank calls, passes its part of the probe through its own
    model, and returns what the whole probe gives.

    Args:
        model: the decoder, or a wrapped one of ``transformers``, in any state; it is left exactly as it was.
        probe_NT: int64 token ids ``[N, T]``.
        birth: reference of this model's own birth; where it is not known, what compares with it is left out.
        strangers: references of other births of the same config.
        batch_size: sequences in one pass; the result does not depend on it.
        sink_epsilon: ε of the sink rate.
        metrics: your own: ``module:Class``, classes or instances (docs/extending.md).
        documents_NT: the number of each token's document in its sequence, rising, int64 ``[N, T]``; by default a
            sequence is one document.

    Raises:
        UsageError: one of your metrics is none.
        RunError: the model gives NaN or inf, and where in the pass first; or one of your metrics fails, or changes the
            model.
    """
    sources = find_metrics(metrics)
    setting = Setting(model, probe_NT.shape[1], birth, strangers or [], sink_epsilon, documents_NT is not None)
    finite = FiniteWatch(model.config.n_layers, setting.device)
    with left_alone(model, sources), evaluation_mode(model), read_weights(KeySummer):
        theirs = [Guarded(source, setting) for source in sources]
        observed = [*our_metrics(setting), *theirs]
        observer = MetricObserver(observed, finite)
        if documents_NT is None:
            _pass(model, Batches(model, probe_NT, batch_size), observer)
        else:
            _pass_over_documents(model, Batches(model, np.stack([probe_NT, documents_NT], 1), batch_size), observer)
        # Every rank raises, or none: the metrics below wait for one another.
        for metric in theirs:
            metric.check()
        if (place := finite.first(everywhere=True)) is not None:
            raise RunError(f"the model gives NaN or inf, first in {place}")
        return summarise(observed, setting.sizes)
