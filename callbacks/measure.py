"""One forward pass over a probe, read by every metric at once. Plain PyTorch: any loop can call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RunError
from ..metrics.preference import TokenPreference
from ..models.decoder import Decoder
from .observer import BiasObserver, ReferenceObserver
from .summary import BirthReference, Measurement, summarise

__all__ = ["BirthReference", "Measurement", "birth_reference", "measure", "undisturbed"]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate without a trace: no gradients, no autocast, every module's mode put back as it was."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device.type
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _Batches:
    """A probe ``[N, T]`` in batches, on the model's device."""

    def __init__(self, model: nn.Module, probe_NT: np.ndarray, batch_size: int) -> None:
        self.device = next(model.parameters()).device
        self.parts = torch.from_numpy(np.ascontiguousarray(probe_NT)).split(batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        return (part.to(self.device) for part in self.parts)


def birth_reference(model: Decoder, probe_NT: np.ndarray, batch_size: int) -> BirthReference:
    """Seed direction and token preference of a newborn model, from one pass over the probe."""
    device = next(model.parameters()).device
    observer, preference = ReferenceObserver(model.config, device), TokenPreference(model.config.vocab_size).to(device)
    with undisturbed(model):
        for tokens_BT in _Batches(model, probe_NT, batch_size):
            preference.update(model(tokens_BT, last_only=True, observer=observer))
    return BirthReference(observer.alignment.compute().mean_direction, preference.compute().mean_prob)


def measure(
    model: Decoder,
    probe_NT: np.ndarray,
    birth: BirthReference,
    strangers: list[BirthReference],
    *,
    batch_size: int = 64,
    sink_epsilon: float = 0.3,
) -> Measurement:
    """Every quantity of definitions §3–7 from one forward pass over a probe.

    The pass runs in the parameters' own precision; statistics are float32 inside a batch (float64 where the parameters
    are) and float64 across batches.

    Args:
        model: the decoder, in any state; it is left exactly as it was.
        probe_NT: int64 token ids ``[N, T]``.
        birth: reference of this model's own birth.
        strangers: references of other births of the same config.
        batch_size: sequences in one pass; the result does not depend on it.
        sink_epsilon: ε of the sink rate.

    Raises:
        RunError: the model gives NaN or inf; says where in the pass first.
    """
    device = next(model.parameters()).device
    references = torch.from_numpy(np.stack([r.direction for r in [birth, *strangers]]))
    observer = BiasObserver(model.config, references, probe_NT.shape[1], sink_epsilon, device)
    preference = TokenPreference(model.config.vocab_size).to(device)
    with undisturbed(model):
        for tokens_BT in _Batches(model, probe_NT, batch_size):
            logits_BV = model(tokens_BT, last_only=True, observer=observer)
            observer.finite.see("logits", model.config.n_layers, logits_BV)
            if (place := observer.finite.first()) is not None:
                raise RunError(f"the model gives NaN or inf, first in {place}")
            preference.update(logits_BV)
        return summarise(model, observer, preference, birth, strangers)
