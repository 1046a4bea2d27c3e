"""Interventions on blocks of a model, and their effect on sinks (definitions §8) [SO].

Legend: B sequences, H query heads, T positions, K head width, D width of the residual stream, V vocabulary, C channels
or hidden units, P watched keys, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RunError, UsageError
from ..models.attention.fused.backends import over_heads
from ..models.attention.normalisers import WeightedSum, query_blocks
from ..models.decoder import Decoder
from ..models.mlp import MLP
from ..models.observe import Attended, Site
from .hf import HFModel
from .hf.observed_pass import first_of
from .intervention_kinds import Aggregation, ChangedPlace, Intervention, MeanOf
from .measurement import evaluation_mode
from .next_tokens import first_prediction, losses_of, mean_and_error, passes, sequence_means, sequences_at_once
from .observed_metrics import Setting

#: Function from the result of a place in a block (from 1) to its replacement; None: unchanged.
Tap = Callable[[int, Any], Tensor | None]


@dataclass(frozen=True)
class PassFigures:
    """Figures of one pass over the probe, means over sequences, float64. NaN if a block does not show them."""

    dose: float | None
    """λ, or 1 for a kind without doses; None for the unchanged model."""
    attention: np.ndarray
    """``[L, H, P]``: mean of ``a[t, k]`` over the queries ``t > k``."""
    attention_to_first: np.ndarray
    """``[L, H, P]``: attention of the same queries to key 0."""
    state_norm: np.ndarray
    """``[L, P]``: norm of the residual stream at the key, after the block."""
    channel: np.ndarray
    """``[L, P]``: the channel that is largest there in the mean of absolute values, int64."""
    channel_value: np.ndarray
    """``[L, P]``: its mean."""
    norm_before: np.ndarray
    """``[L, P]``: norm of all heads' aggregation at the key before the change; NaN in unchanged blocks."""
    norm_after: np.ndarray
    """``[L, P]``: the same after it."""
    losses: np.ndarray | None
    """``[N]``: mean loss of each sequence, nats per token; None where the probe is no text."""


@dataclass(frozen=True)
class Intervened:
    """Figures of a model unchanged and changed, on one probe."""

    what: Intervention
    n_sequences: int
    seq_len: int
    passes: list[PassFigures]
    """The first of the model left alone, then one per dose."""

    @property
    def keys(self) -> tuple[int, ...]:
        """Watched keys."""
        return self.what.watched

    @cached_property
    def uniform(self) -> np.ndarray:
        """Weight of uniform attention on each watched key, ``[P]``."""
        return np.array([np.mean(1 / np.arange(key + 2, self.seq_len + 1)) for key in self.keys])

    def loss(self, number: int) -> tuple[float, float] | None:
        """Return the mean loss of a pass and its standard error over sequences; None if the probe is not text."""
        losses = self.passes[number].losses
        return None if losses is None else mean_and_error(losses)

    def loss_increase(self, number: int) -> tuple[float, float] | None:
        """Return the mean over sequences of the loss that a pass adds to the unchanged model's, and its
        standard error.
        """
        losses, alone = self.passes[number].losses, self.passes[0].losses
        return None if losses is None or alone is None else mean_and_error(losses - alone)

    def stacked(self, name: str) -> np.ndarray:
        """Stack a figure over all passes, ``[passes, …]``."""
        return np.stack([getattr(figures, name) for figures in self.passes])


def intervene(
    model: Decoder | HFModel,
    probe_NT: np.ndarray,
    what: Intervention,
    *,
    random_NT: np.ndarray | None = None,
    documents_NT: np.ndarray | None = None,
    is_text: bool = False,
    batch_size: int = 64,
    alone: PassFigures | None = None,
    advance: Callable[[int], object] = lambda n_passes: None,
) -> Intervened:
    """Read a probe with a model unchanged, and once for each dose with blocks of it changed.

    Args:
        model: a decoder, or a model of ``transformers``; left unchanged.
        probe_NT: int64 token ids ``[N, T]``.
        what: the intervention.
        random_NT: random tokens that means of values are over; by default the probe.
        documents_NT: numbers of the tokens' documents, −1 of padding, whose prediction does not count.
        is_text: if the loss of the next tokens is meaningful.
        batch_size: sequences in one pass, at most; the result does not depend on it.
        alone: figures of the unchanged model on this probe, with the same watched keys; by default they are measured.
        advance: called with the number of finished passes.

    Raises:
        UsageError: see :meth:`Intervention.check`; or a block does not show what is to be changed.
        RunError: the model gives NaN or inf, or a dose makes states whose norm its precision does not hold.
    """
    seq_len = probe_NT.shape[1]
    what.check(model.config, seq_len)
    _check_seen(model, what, seq_len)
    probe = _Probe(probe_NT, documents_NT, is_text, batch_size)
    found: list[PassFigures] = [] if alone is None else [alone]
    doses: list[float | None] = [*what.doses] if found else [None, *what.doses]
    with evaluation_mode(model):
        means = {} if what.means.follows_change(what) else _means(model, what, probe, random_NT)
        for dose in doses:
            if dose is not None and what.means.follows_change(what):
                means = _means_while_changed(model, what, dose, probe)
            readings = _read(model, what, dose, means, probe)
            if not readings.finite:
                if dose is None:
                    raise RunError("the model gives NaN or inf, or states too large for a norm, also left alone")
                named = "lambdas" in what.means.options
                name, mend = (f"lambda {dose:g}", "; give a smaller one") if named else (f"kind {what.kind}", "")
                raise RunError(f"{name}: makes NaN, inf, or states too large for a norm{mend}")
            found.append(readings.figures(dose))
            advance(1)
    return Intervened(what, len(probe_NT), seq_len, found)


@dataclass(frozen=True)
class _Probe:
    """Input of every pass."""

    tokens_NT: np.ndarray
    documents_NT: np.ndarray | None
    is_text: bool
    batch_size: int


def _check_seen(model: Decoder | HFModel, what: Intervention, seq_len: int) -> None:
    place = {"aggregation": "attention", "units": "neurons"}.get(what.means.place)
    for unseen in Setting(model, seq_len).unseen:
        if unseen.place == place and (wrong := sorted(set(what.layers) & set(unseen.layers))):
            called = "hidden units" if place == "neurons" else "attention"
            raise UsageError(f"layers {wrong[0]}: its {called} cannot be changed ({unseen.why}); give other blocks")


# ── what is changed, and where ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _tapped(
    model: Decoder | HFModel, place: ChangedPlace, layers: Collection[int], tap: Tap, seq_len: int
) -> Iterator[None]:
    """Call ``tap``, within the context, with the result of a place of the blocks; ``tap`` decides the replacement."""
    with ExitStack() as stack:
        if place == "aggregation":
            _tap_attention(model, layers, tap, stack)
            yield
            return
        blocks = model.blocks
        readers = _unit_readers(model) if place == "units" else {}
        for layer in layers:
            if place == "units":
                handle = readers[layer].register_forward_pre_hook(partial(_tap_units, partial(tap, layer), seq_len))
            else:
                handle = blocks[layer - 1].register_forward_hook(partial(_tap_stream, partial(tap, layer)))
            stack.callback(handle.remove)
        yield


def _tap_attention(model: Decoder | HFModel, layers: Collection[int], tap: Tap, stack: ExitStack) -> None:
    """Tap the attention before norm, calibration and gate, which then read the changed values."""

    def change(layer: int, weighted: WeightedSum, v_BHTK: Tensor) -> None:
        if layer in layers:
            seen = Aggregation(weighted.o_BHTK, v_BHTK, lambda key: weights_on(weighted, [key])[..., 0])
            if (changed := tap(layer, seen)) is not None:
                weighted.o_BHTK = changed.to(weighted.o_BHTK.dtype)

    if isinstance(model, HFModel):
        stack.callback(setattr, model, "change_attention", model.change_attention)
        model.change_attention = change
        return
    for layer in layers:

        def hook(module: nn.Module, args: tuple[Any, ...], layer: int = layer) -> None:
            weighted, v_BGTK = args
            change(layer, weighted, over_heads(v_BGTK, weighted.o_BHTK.shape[1]))

        attention: Any = model.blocks[layer - 1].attn
        stack.callback(attention.aggregate.register_forward_pre_hook(hook).remove)


def _tap_units(tap: Callable[[Tensor], Tensor | None], seq_len: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
    # Some MLPs are given all positions of all sequences in one axis.
    a_BTF = args[0].reshape(-1, seq_len, args[0].shape[-1])
    changed = tap(a_BTF)
    return None if changed is None else (changed.reshape(args[0].shape), *args[1:])


def _tap_stream(tap: Callable[[Tensor], Tensor | None], module: nn.Module, args: Any, output: Any) -> Any:
    changed = tap(first_of(output))
    if changed is None:
        return None
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


def _unit_readers(model: Decoder | HFModel) -> Mapping[int, nn.Module]:
    """Return, by block from 1, the map that reads the hidden units."""
    if isinstance(model, HFModel):
        return model.unit_readers()
    mlps = ((layer, block.mlp) for layer, block in enumerate(model.blocks, start=1))
    return {layer: mlp.down for layer, mlp in mlps if isinstance(mlp, MLP)}


def weights_on(weighted: WeightedSum, keys: Sequence[int], n_queries: int | None = None) -> Tensor:
    """Return the weights of all queries on some keys, ``[B, H, T, len(keys)]``, computed a block of queries at
    a time.
    """
    length = weighted.o_BHTK.shape[2] if n_queries is None else n_queries
    blocks = []
    for start, stop in query_blocks(length):
        rows_BHRS = weighted.rows(start, stop)
        missing = max(max(keys) + 1 - rows_BHRS.shape[-1], 0)
        # No query of the block sees a key behind its last one.
        blocks.append(nn.functional.pad(rows_BHRS, (0, missing))[..., list(keys)])
    return torch.cat(blocks, dim=2)


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Readings:
    """Sums over sequences of the readings of one pass at the watched keys."""

    def __init__(self, model: Decoder | HFModel, what: Intervention, dose: float | None) -> None:
        config, device = model.config, model.device
        self.what, self.changed = what, () if dose is None else what.layers
        self.keys, self.n = list(what.watched), 0
        layers, heads, n_keys = config.n_layers, config.n_heads, len(self.keys)

        def sums(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        # Key k and key 0, of the same queries.
        self.attention_2LHP = sums(2, layers, heads, n_keys, value=torch.nan)
        self.norms_2LP = sums(2, layers, n_keys, value=torch.nan)
        self.state_norm_LP = sums(layers, n_keys)
        self.channels_2LPD = sums(2, layers, n_keys, config.d_model)
        self.losses_N: np.ndarray | None = None
        self._broken = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def finite(self) -> bool:
        """True if all states and outputs have a norm."""
        return not self._broken.item()

    def _watch(self, x: Tensor) -> None:
        # A norm whose squares overflow makes zeros, which look like an outcome.
        squares = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)
        self._broken = self._broken | ~squares.isfinite().all()

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py; :meth:`state` reads it after a change."""
        self._watch(h_BTD)

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Read nothing."""

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        self._watch(attended.o_BHTK)
        weights_BHTP = weights_on(attended.weights, [*self.keys, 0], attended.q_BHTK.shape[2]).double()
        if layer in self.changed:
            weights_BHTP = self.what.means.weights_seen(self.what, weights_BHTP)
        for i, key in enumerate(self.keys):
            for which, column in enumerate((i, -1)):
                mean_H = weights_BHTP[:, :, key + 1 :, column].mean(2).sum(0)
                _add(self.attention_2LHP[which, layer - 1, :, i], mean_H)

    def state(self, layer: int, h_BTD: Tensor) -> None:
        """Read the residual stream after a block."""
        self._watch(h_BTD)
        h_BPD = h_BTD[:, self.keys].double()
        self.state_norm_LP[layer - 1] += h_BPD.norm(dim=-1).sum(0)
        self.channels_2LPD[0, layer - 1] += h_BPD.abs().sum(0)
        self.channels_2LPD[1, layer - 1] += h_BPD.sum(0)

    def aggregated(self, layer: int, after: bool, o_BHTK: Tensor) -> None:
        """Read the aggregation of all heads of a changed block at the keys, before the change or after it."""
        norm_BP = o_BHTK[:, :, self.keys].double().norm(dim=(1, 3))
        _add(self.norms_2LP[int(after), layer - 1], norm_BP.sum(0))

    def figures(self, dose: float | None) -> PassFigures:
        """Return the means."""
        attention, norms = (x.cpu().numpy() / self.n for x in (self.attention_2LHP, self.norms_2LP))
        largest_LP = self.channels_2LPD[0].argmax(-1)
        value_LP = self.channels_2LPD[1].gather(-1, largest_LP[..., None])[..., 0] / self.n
        return PassFigures(
            dose,
            attention[0],
            attention[1],
            (self.state_norm_LP / self.n).cpu().numpy(),
            largest_LP.cpu().numpy(),
            value_LP.cpu().numpy(),
            norms[0],
            norms[1],
            self.losses_N,
        )


def _add(total: Tensor, x: Tensor) -> None:
    """Add to a sum that is NaN until then."""
    total.copy_(total.nan_to_num(nan=0.0) + x)


def _read(
    model: Decoder | HFModel,
    what: Intervention,
    dose: float | None,
    means: Mapping[int, Tensor],
    probe: _Probe,
) -> _Readings:
    """Run one pass over the probe, changed by a dose; None: unchanged."""
    kind, readings = what.means, _Readings(model, what, dose)
    seq_len = probe.tokens_NT.shape[1]

    def tap(layer: int, seen: Any) -> Tensor | None:
        is_aggregation = isinstance(seen, Aggregation)
        if is_aggregation:
            readings.aggregated(layer, False, seen.o_BHTK)
        changed = None if dose is None else kind.changed(what, dose, seen, means.get(layer))
        if is_aggregation:
            readings.aggregated(layer, True, seen.o_BHTK if changed is None else changed)
        return changed

    losses: list[Tensor] = []
    every = range(1, model.config.n_layers + 1)
    first = first_prediction(model.config, seq_len) if probe.is_text else 0
    step = sequences_at_once(model, probe.batch_size, seq_len if probe.is_text else 1)
    with (
        _tapped(model, kind.place, what.layers, tap, seq_len),
        _tapped(model, "stream", every, readings.state, seq_len),
    ):
        for tokens_BT, more in passes(model, probe.tokens_NT, probe.documents_NT, step):
            logits = model(tokens_BT, last_only=not probe.is_text, observer=readings, **more)
            readings.n += len(tokens_BT)
            if probe.is_text:
                losses.append(losses_of(logits, tokens_BT, first))
    if losses:
        readings.losses_N = sequence_means(losses, probe.documents_NT, first)
    return readings


# ── means ────────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Quantity → the place that shows it, and the part of it that is summed over sequences and positions.
_MEANS: Mapping[MeanOf, tuple[ChangedPlace, Callable[[Any], Tensor]]] = {
    "outputs": ("aggregation", lambda seen: seen.o_BHTK.transpose(1, 2)),
    "values": ("aggregation", lambda seen: seen.v_BHTK.transpose(1, 2)),
    "units": ("units", lambda seen: seen),
    "stream": ("stream", lambda seen: seen),
}


class _Nothing:
    """Observer that reads nothing."""

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """Read nothing."""

    def attention(self, layer: int, attended: Attended) -> None:
        """Read nothing."""

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Read nothing."""


def _means(
    model: Decoder | HFModel, what: Intervention, probe: _Probe, random_NT: np.ndarray | None
) -> dict[int, Tensor]:
    """Return, by block, the mean that the intervention needs, from the unchanged model, float64; empty if it needs
    none.
    """
    of = what.means.mean_of(what)
    if of is None:
        return {}
    place, shown = _MEANS[of]
    of_values = of == "values" and random_NT is not None
    tokens_NT = random_NT if of_values and random_NT is not None else probe.tokens_NT
    documents_NT = None if of_values else probe.documents_NT
    totals: dict[int, Tensor] = {}

    def tap(layer: int, seen: Any) -> None:
        total = shown(seen).sum((0, 1), dtype=torch.float64)
        totals[layer] = totals[layer] + total if layer in totals else total

    with _tapped(model, place, what.layers, tap, tokens_NT.shape[1]):
        for tokens_BT, more in passes(model, tokens_NT, documents_NT, probe.batch_size):
            model(tokens_BT, last_only=True, observer=_Nothing(), **more)
    return {layer: total / tokens_NT.size for layer, total in totals.items()}


class _EndOfPassError(Exception):
    """Signal that ends a pass once its rest is not needed."""


def _means_while_changed(model: Decoder | HFModel, what: Intervention, dose: float, probe: _Probe) -> dict[int, Tensor]:
    """Return, by block, the mean of heads' outputs, float64 ``[H, K]``, while the chosen blocks before it are replaced
    by their means. Each pass ends in that block.
    """
    means: dict[int, Tensor] = {}
    for last in sorted(what.layers):
        totals: list[Tensor] = []

        def tap(layer: int, seen: Any, last: int = last, totals: list[Tensor] = totals) -> Tensor:
            if layer == last:
                totals.append(seen.o_BHTK.sum((0, 2), dtype=torch.float64))
                raise _EndOfPassError
            return what.means.changed(what, dose, seen, means[layer])

        layers = [layer for layer in what.layers if layer <= last]
        with _tapped(model, "aggregation", layers, tap, probe.tokens_NT.shape[1]):
            for tokens_BT, more in passes(model, probe.tokens_NT, probe.documents_NT, probe.batch_size):
                with suppress(_EndOfPassError):
                    model(tokens_BT, last_only=True, observer=_Nothing(), **more)
        means[last] = torch.stack(totals).sum(0) / probe.tokens_NT.size
    return means
