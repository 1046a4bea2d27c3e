"""Interventions at one layer and position, and the sink that they do or do not create (definitions §8) [SO]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RunError, UsageError
from ..metrics.sinks import AttentionSinks
from ..models.attention.grouped_heads import over_heads
from ..models.attention.normalisers import WeightedSum
from ..models.config import ModelConfig
from ..models.decoder import Block, Decoder
from ..models.observe import Attended, Site
from .intervention_kinds import Kind
from .measurement import Batches, evaluation_mode
from .ranks import sum_over_ranks


@dataclass(frozen=True)
class DoseResponse:
    """Importance of the key at the position in the layers after the one intervened on, mean over sequences."""

    kind: Kind
    layer: int
    """From 1, as everywhere; a causal effect shows in the layers after it."""
    position: int
    lambdas: list[float]
    """One per row; of ``mask``, which has no dose, 0 (left alone) and 1 (masked)."""
    importance: np.ndarray
    """``[doses, L − layer, H]`` float64."""
    uniform: float
    """What uniform attention would give."""


def check(config: ModelConfig, kind: Kind, layer: int, position: int, seq_len: int, lambdas: Sequence[float]) -> None:
    """Whether an intervention is possible.

    Raises:
        UsageError: what is wrong, with the mend.
    """
    attention = config.attention
    if kind not in get_args(Kind):
        raise UsageError(f"kind {kind}: give one of {', '.join(get_args(Kind))}")
    if not 1 <= layer < config.n_layers:
        raise UsageError(f"layer {layer}: give 1 to {config.n_layers - 1}, so that a block after it can respond")
    if not 0 <= position < seq_len:
        raise UsageError(f"position {position}: give 0 to {seq_len - 1}, which is where the probe ends")
    if kind != "mask" and not lambdas:
        raise UsageError(f"kind {kind}: give one lambda at least")
    if kind != "mask" and (wrong := [dose for dose in lambdas if not np.isfinite(dose)]):
        raise UsageError(f"lambda {wrong[0]}: give a finite number")
    softmax = attention.normaliser == "softmax" and attention.kv_bias == "none"
    if kind == "mask" and not (softmax and attention.aggregation != "calibrated"):
        raise UsageError("kind mask: this attention is no plain softmax, or its output is calibrated by its weights")


def intervene(
    model: Decoder,
    probe_NT: np.ndarray,
    kind: Kind,
    layer: int,
    position: int,
    lambdas: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    *,
    batch_size: int = 64,
) -> DoseResponse:
    """Change one block's value aggregation at one position, and look at what later blocks give to that key.

    With ``o`` the value aggregation of every head and ``k`` the position: ``mask``, query k sees itself only,
    ``o_k ← v_k``; ``amplify``, ``o_k ← μ + λ(o_k − μ)``, μ a head's mean over sequences and positions; ``scale``, the
    control, ``o_k ← λ·o_k``. One pass per dose, and one for μ.

    Args:
        model: the decoder; it is left exactly as it was.
        probe_NT: int64 token ids ``[N, T]``.
        kind: what is done.
        layer: block, from 1.
        position: k, from 0.
        lambdas: doses; not read by ``mask``.
        batch_size: sequences in one pass.

    Raises:
        UsageError: see :func:`check`.
        RunError: the model gives NaN or inf, or a dose makes states whose norm its precision does not hold.
    """
    config, seq_len = model.config, probe_NT.shape[1]
    check(config, kind, layer, position, seq_len, lambdas)
    doses = [0.0, 1.0] if kind == "mask" else [float(dose) for dose in lambdas]
    batches = Batches(model, probe_NT, batch_size)

    def look() -> _LaterSinks:
        seen = _LaterSinks(config, layer, seq_len, batches.device)
        for tokens_BT, counts in batches:
            model(tokens_BT, last_only=True, observer=seen if counts else None)
        return seen

    rows = []
    with evaluation_mode(model):
        mean_HK = _mean(model, batches, layer) if kind == "amplify" else None
        for dose in doses:
            with _changed(model, kind, layer, position, dose, mean_HK):
                seen = look()
            if not seen.finite:
                if not look().finite:
                    raise RunError("the model gives NaN or inf, or states too large for a norm, also left alone")
                name, mend = (kind, "") if kind == "mask" else (f"lambda {dose:g}", "; give a smaller one")
                raise RunError(f"{name}: makes NaN, inf, or states too large for a norm{mend}")
            rows.append(seen.sinks.compute().importance[..., position])
    uniform = float(np.mean(1 / np.arange(position + 1, seq_len + 1)))
    return DoseResponse(kind, layer, position, doses, np.stack(rows), uniform)


class _Nothing:
    """An observer that reads nothing."""

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """Not read."""

    def attention(self, layer: int, attended: Attended) -> None:
        """Not read."""

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Not read."""


class _LaterSinks(_Nothing):
    """Importance of every key in the blocks after one, and whether all states have a norm."""

    def __init__(self, config: ModelConfig, layer: int, seq_len: int, device: torch.device) -> None:
        self.layer = layer
        self.sinks = AttentionSinks(config.n_layers - layer, config.n_heads, seq_len).to(device)
        self._broken = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def finite(self) -> bool:
        """On every rank."""
        return not sum_over_ranks(self._broken.int()).item()

    def _watch(self, x: Tensor) -> None:
        # A norm whose squares overflow makes zeros, which look like an outcome.
        squares = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)
        self._broken = self._broken | ~squares.isfinite().all()

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        self._watch(h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        self._watch(attended.o_BHTK)
        if layer > self.layer:
            self.sinks.update(layer - self.layer - 1, attended.weights)


class _HeadMeans(_Nothing):
    """Mean value aggregation of one block's heads."""

    def __init__(self, layer: int) -> None:
        self.layer, self.n = layer, 0
        self.sum_HK: Tensor | float = 0.0

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        if layer == self.layer:
            o_BHTK = attended.o_BHTK
            self.sum_HK = self.sum_HK + o_BHTK.sum((0, 2), dtype=torch.float64)
            self.n += o_BHTK.shape[0] * o_BHTK.shape[2]


def _mean(model: Decoder, batches: Batches, layer: int) -> Tensor:
    """μ ``[H, K]``, float64."""
    means = _HeadMeans(layer)
    for tokens_BT, counts in batches:
        model(tokens_BT, last_only=True, observer=means if counts else None)
    assert isinstance(means.sum_HK, Tensor)
    return means.sum_HK / means.n


@contextmanager
def _changed(
    model: Decoder, kind: Kind, layer: int, position: int, dose: float, mean_HK: Tensor | None
) -> Iterator[None]:
    """The intervention, while a pass runs: before norm, calibration and gate, which then see what was changed."""

    def change(module: nn.Module, args: tuple[Any, ...]) -> None:
        weighted, v_BGSK = args
        assert isinstance(weighted, WeightedSum)
        o_BHK = weighted.o_BHTK[:, :, position]
        if kind == "mask":
            changed_BHK = over_heads(v_BGSK[:, :, [position]], o_BHK.shape[1])[:, :, 0] if dose else o_BHK
        elif kind == "scale":
            changed_BHK = dose * o_BHK
        else:
            assert mean_HK is not None
            changed_BHK = mean_HK + dose * (o_BHK - mean_HK)
        weighted.o_BHTK = weighted.o_BHTK.clone()
        weighted.o_BHTK[:, :, position] = changed_BHK.to(weighted.o_BHTK.dtype)

    block = model.blocks[layer - 1]
    assert isinstance(block, Block)
    handle = block.attn.aggregate.register_forward_pre_hook(change)
    try:
        yield
    finally:
        handle.remove()
