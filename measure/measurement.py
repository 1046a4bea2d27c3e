"""One forward pass over a probe, read by every metric at once. Plain PyTorch: any loop can call it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ..errors import UsageError
from ..metrics.sinks import KeySummer
from ..models.attention.fused import weight_sums
from ..models.attention.weight_reader import read_weights
from ..models.decoder import Decoder
from ..models.observe import Site
from ..models.tensor_shards import reshard
from .builtin_metrics import OBSERVED, ObservedBirth, ObservedPreference, builtin_metrics
from .config import AttentionWeights
from .hf import HFModel
from .hf.hf_model import Looked
from .hf.observed_pass import evaluating
from .observed_metrics import Arrays, BirthReference, MetricSource, Scalars, Setting
from .passes import (
    Batches,
    FiniteWatch,
    MetricObserver,
    not_finite,
    pass_of,
)
from .summary import Measurement, summarise
from .user_metrics import Guarded, MetricLike, find_metrics, left_alone

# ---------------------------------------------------------------- a birth compared with itself


class ObservedNewborn(ObservedBirth):
    """:class:`ObservedBirth` of a birth in a pass by block: its reference needs no other pass.

    The setting's ``birth`` holds zeros, which are filled in as places are passed. A place's last positions are kept
    until the place is whole and its seed direction therefore known.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.kept: list[Tensor] = []

    @override
    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        if site != "attention":
            self.kept.append(h_BTD[:, -1:].clone())

    def passed(self, layer: int) -> None:
        """Take the block's direction for the birth's, and compare its states with it."""
        assert self.birth is not None
        last_N1D = torch.cat(self.kept)
        self.kept = []
        direction_D = F.normalize(last_N1D.sum((0, 1), dtype=torch.float64), dim=-1, eps=0.0)
        self.alignment.references[0, layer] = direction_D
        self.birth.direction[layer] = direction_D.cpu().numpy()
        self.alignment.update(layer, last_N1D)

    def result(self) -> tuple[Scalars, Arrays]:
        """Return scalars and arrays, with the preferences of this pass for those of the birth."""
        assert self.birth is not None
        self.birth.mean_prob[:] = self.preference.compute().mean_prob
        return super().result()


# ---------------------------------------------------------------- the measurement

__all__ = ["Batches", "BirthReference", "Measurement", "birth_reference", "evaluation_mode", "look", "measure"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate without a trace: no gradients, no autocast, every module's mode restored, and gathered weights freed.

    Raises:
        UsageError: the model's device has no float64.
    """
    device = model.device
    assert isinstance(device, torch.device)
    if device.type == "mps":
        raise UsageError(
            "the model is on mps, which has no float64 to add statistics in: move it to the CPU "
            '(Lightning: accelerator="cpu", TrainingArguments: use_cpu=True)'
        )
    try:
        with evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        reshard(model)


def check_attention_weights(way: AttentionWeights, device_type: str) -> None:
    """Raise UsageError if attention weights cannot be read this way on a type of device."""
    if way == "walk" and (why := weight_sums.why_not(device_type)):
        raise UsageError(f"snapshot.attention_weights is walk, whose kernels do not run here ({why}): give blocks")


def _reading(model: Decoder | HFModel, way: AttentionWeights) -> AbstractContextManager[None]:
    """Read weights this way within a context."""
    check_attention_weights(way, model.device.type)
    return read_weights(KeySummer, by_walk=way == "walk")


def look(model: HFModel, seq_len: int) -> Looked:
    """Inspect a model in advance, so that a later measurement need not. Collective: call on every rank.

    Raises:
        UsageError: the model cannot be measured.
    """
    with evaluation_mode(model), read_weights(KeySummer):
        return model.look(seq_len)


def birth_reference(
    model: Decoder | HFModel,
    probe_NT: np.ndarray,
    batch_size: int | None = None,
    attention_weights: AttentionWeights = "blocks",
) -> BirthReference:
    """Measure seed direction and token preference of a newborn model, in one pass over the probe."""
    setting = Setting(model, probe_NT.shape[1])
    with setting.tensors_on_device():
        observer = MetricObserver([ObservedBirth(setting), ObservedPreference(setting)])
    # Weights are read, though nothing here needs their sums: then p̄ at birth is that of a measurement, bit for bit.
    with evaluation_mode(model), _reading(model, attention_weights):
        _ = setting.unseen  # all ranks look, also one that is without a batch
        pass_of(model)(observer, probe_NT, batch_size)
    return BirthReference(setting.alignment.compute().mean_direction, setting.preference.compute().mean_prob)


def measure(
    model: Decoder | HFModel,
    probe_NT: np.ndarray,
    birth: BirthReference | None = None,
    strangers: list[BirthReference] | None = None,
    *,
    batch_size: int | None = None,
    sink_epsilon: float = 0.3,
    metrics: Sequence[MetricLike | MetricSource] = (),
    documents_NT: np.ndarray | None = None,
    is_newborn: bool = False,
    attention_weights: AttentionWeights = "blocks",
) -> Measurement:
    """Measure every quantity of definitions §3–7, and your own metrics, in one forward pass over a probe.

    The pass runs in the parameters' own precision; statistics are float32 inside a batch (float64 if the parameters
    are) and float64 across batches. Collective: call on every rank. Each passes its part of the probe through its model
    and returns the result of the whole probe.

    Args:
        model: the decoder, or a wrapped one of ``transformers``, in any state; it is left unchanged. A
            :class:`DecoderByBlock` has one block at a time in memory.
        probe_NT: int64 token ids ``[N, T]``.
        birth: reference of this model's birth; without it, comparisons with birth are left out.
        strangers: references of other births of the same config.
        batch_size: sequences in one pass, by default a number that suits the device; the result does not depend on it.
        sink_epsilon: ε of the sink rate.
        metrics: your own: ``module:Class``, classes or instances (docs/extending.md).
        documents_NT: the number of each token's document in its sequence, rising, int64 ``[N, T]``; by default a
            sequence is one document.
        is_newborn: the model is a birth with one block at a time in memory, and is compared with itself in the same
            pass; leave ``birth`` out.
        attention_weights: way of reading them (``SnapshotConfig``).

    Raises:
        UsageError: the probe's sequences have one position, one of your metrics is not a metric, or attention weights
            cannot be read this way on this machine.
        RunError: the model gives NaN or inf, or states whose squares are inf (names the first place in the pass); or
            one of your metrics fails, or changes the model.
    """
    sources, run, config = find_metrics(metrics), pass_of(model), model.config
    builtin = dict(OBSERVED)
    if is_newborn:
        # Metrics that the pass itself supplies.
        builtin[ObservedNewborn.key] = ObservedNewborn
        birth = BirthReference(np.zeros((config.n_layers + 1, config.d_model)), np.zeros(config.vocab_size))
    setting = Setting(
        model,
        probe_NT.shape[1],
        birth,
        strangers or [],
        sink_epsilon,
        documents_NT is not None,
        by_block=run.by_block,
        n_same=int((probe_NT == probe_NT[:1]).all(0).cumprod().sum()),
        n_sequences=len(probe_NT),
    )
    finite = FiniteWatch(config.n_layers, setting.device)
    # Weights that are released with their block are not compared: changes by a metric are gone with them.
    with left_alone(model, [] if run.by_block else sources), evaluation_mode(model), _reading(model, attention_weights):
        _ = setting.unseen
        user_metrics = [Guarded(source, setting) for source in sources]
        observed = [*builtin_metrics(setting, builtin), *user_metrics]
        # Metrics that no block shows anything to are not computed.
        shown = [metric for metric in observed if setting.shows(metric)]
        observer = MetricObserver(shown, finite)
        run(observer, probe_NT, batch_size, documents_NT)
        # Every rank raises, or none: the metrics below wait for one another.
        for metric in user_metrics:
            metric.check()
        if (place := finite.first(everywhere=True)) is not None:
            raise not_finite(place, model)
        if not run.by_block:
            for layer in range(config.n_layers + 1):
                observer.passed(layer)
        return summarise(observed, setting)
