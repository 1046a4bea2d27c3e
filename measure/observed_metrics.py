"""Metrics of a snapshot as the instrument sees them: the places of a pass that they read, and the values that they give
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from ..errors import RunError
from ..metrics.directions import SeedAlignment
from ..metrics.head_sums import QuerySums, query_sums
from ..metrics.preference import TokenPreference
from ..metrics.quantity import Quantity, Sizes
from ..metrics.rankings import Ranked
from ..metrics.sinks import KeySums, key_sums
from ..models.adapter_config import AdapterConfig
from ..models.adapters import adapter_of
from ..models.config import ModelConfig
from ..models.decoder import Block, Decoder
from ..models.mlp import MLP
from ..models.observe import Attended, Unseen
from ..models.tensor_shards import full_tensor
from .hf import HFConfig, HFModel

Scalars = dict[str, float | np.floating | np.integer]
Arrays = dict[str, np.ndarray]
Place = Literal["residual", "attention", "sublayer", "neurons", "routing", "expert_units", "logits"]

PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class BirthReference:
    """Reference of later checkpoints: the mean directions and the preference of a newborn model."""

    direction: np.ndarray
    """``[L+1, d]`` float64 unit vectors: the seed direction."""
    mean_prob: np.ndarray
    """``[V]`` float64: p̄."""

    @cached_property
    def preference(self) -> Ranked:
        """p̄ with its ranks, with which all snapshots of a run are compared."""
        return Ranked(self.mean_prob)


@dataclass(frozen=True)
class AttentionView(Attended):
    """An attention for metrics, with the sums over its weights and queries, which are taken once for all of them."""

    first_BT: Tensor | None = None
    """First position of each position's document; None if each sequence counts as one."""
    tokens_BT: Tensor | None = None
    """The batch; None if the caller of the pass does not give it."""

    @cached_property
    def sums(self) -> KeySums:
        """Sums of the weights that queries give to keys."""
        return key_sums(self.weights, self.q_BHTK.shape[2], self.first_BT)

    @cached_property
    def query_sums(self) -> QuerySums:
        """Sums over the queries."""
        return query_sums(self.q_BHTK, self.k_BHTK)


def sizes_of(config: ModelConfig | HFConfig, seq_len: int) -> Sizes:
    """Return the sizes of a model and of a probe's sequences."""
    d_key = config.d_head if isinstance(config, HFConfig) else config.d_key
    shape = config.n_layers, config.n_heads, config.d_model, d_key, config.ff, config.vocab_size
    value = None if config.d_value == d_key else config.d_value
    if isinstance(config, HFConfig):
        experts = config.n_experts, config.d_expert
    else:
        own = config.experts
        experts = (own.n_experts, own.d_ff or config.ff) if own.n_experts else (0, 0)
    return Sizes(*shape, seq_len, value, *experts)


@dataclass(frozen=True)
class Setting:
    """Inputs from which the metrics of one measurement are made."""

    model: Decoder | HFModel
    seq_len: int
    birth: BirthReference | None = None
    strangers: Sequence[BirthReference] = field(default_factory=list)
    sink_epsilon: float = 0.3
    has_documents: bool = False
    """True if the probe's sequences hold several documents."""
    by_block: bool = False
    """True if all batches pass a block before any passes the next, so that a place is complete once passed."""
    n_same: int = 0
    """Leading positions at which all sequences of the probe hold the same tokens."""
    n_sequences: int = 0
    """Sequences of the probe."""

    @property
    def n_constant(self) -> int:
        """Leading positions whose states are the same in all sequences: none where queries see later tokens."""
        if isinstance(self.model, HFModel):
            return 0 if self.model.sees_later else self.n_same
        return 0 if self.model.config.attention.prefix else self.n_same

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the model and the probe."""
        return sizes_of(self.model.config, self.seq_len)

    @cached_property
    def unseen(self) -> tuple[Unseen, ...]:
        """Places that the model does not show. For a model of ``transformers`` the first call reads one sequence."""
        if isinstance(self.model, HFModel):
            return self.model.unseen(self.seq_len)
        return (Unseen("neurons", self._routed, "a mixture of experts"),) if self._routed else ()

    @cached_property
    def _routed(self) -> tuple[int, ...]:
        """The blocks, from 1, that have experts."""
        if isinstance(self.model, HFModel):
            return self.model.routed
        experts = self.model.config.experts
        return tuple(i + 1 for i in range(self.model.config.n_layers) if experts.in_block(i))

    def missing(self, metric: Observed) -> frozenset[int]:
        """Return the blocks, from 1, that do not show a place that the metric reads."""
        found = {layer for u in self.unseen if _reads(metric, u.place) for layer in u.layers}
        if metric.hook("routing") is not None or metric.hook("expert_units") is not None:
            found |= set(range(1, self.sizes.n_layers + 1)).difference(self._routed)
        return frozenset(found)

    def shows(self, metric: Observed) -> bool:
        """Return True if any block shows the metric all places that it reads."""
        return len(self.missing(metric)) < self.sizes.n_layers

    @cached_property
    def device(self) -> torch.device:
        """Device of the states."""
        return self.model.device

    def tensors_on_device(self) -> AbstractContextManager[Any]:
        """Make new tensors on the device within a context: on a GPU gigabytes of zeros are made, not sent."""
        # A default device slows every operator down.
        return nullcontext() if torch.get_default_device() == self.device else self.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of sums inside a batch that need not be float64."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    @property
    def rows_sum_to_one(self) -> bool:
        """True if weights divided by their row's sum are the weights."""
        return self.model.config.attention.rows_sum_to_one and not self.adapter.has_keys

    @property
    def adapter(self) -> AdapterConfig:
        """Config of the adapter on the model."""
        return adapter_of(self.model)

    @cached_property
    def alignment(self) -> SeedAlignment:
        """Metric that compares with the model's birth, if known, then with strangers."""
        known = [*([] if self.birth is None else [self.birth]), *self.strangers]
        directions = [torch.from_numpy(reference.direction) for reference in known]
        none = torch.zeros(0, self.sizes.n_layers + 1, self.sizes.d_model)
        return SeedAlignment(torch.stack(directions) if known else none).to(self.device)

    @cached_property
    def preference(self) -> TokenPreference:
        """Token preference of the pass."""
        return TokenPreference(self.sizes.vocab_size).to(self.device)


def mlp_maps(model: Decoder | HFModel, layer: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return one block's up ``[F, d]``, down ``[d, F]`` and gate ``[F, d]`` maps; None if its units are not seen."""
    if isinstance(model, HFModel):
        return model.mlp_weights(layer)
    block = model.blocks[layer - 1]
    assert isinstance(block, Block)
    if not isinstance(block.mlp, MLP):
        return None
    gate = block.mlp.gate
    # A block at a time is whole.
    gate_FD = None if gate is None else full_tensor(gate.weight)
    return full_tensor(block.mlp.up.weight), full_tensor(block.mlp.down.weight), gate_FD


def _reads(metric: Observed, place: str) -> bool:
    # States after the attention are shown with the rest of the residual stream: their arrays have no place of their
    # own.
    return place in PLACES and metric.hook(place) is not None


def blanked(array: np.ndarray, quantity: Quantity, layers: Collection[int]) -> np.ndarray:
    """Fill the array with NaN for blocks (from 1) that do not show its quantity."""
    if not layers or "layer" not in quantity.axes:
        return array
    array = array.astype(np.promote_types(array.dtype, np.float32))
    np.moveaxis(array, quantity.axes.index("layer"), 0)[[layer - 1 for layer in layers]] = np.nan
    return array


class Observed:
    """A metric (or some that belong together) that an observer feeds.

    A subclass has a method for each place that it reads, with the names and arguments of ``models/observe.py``:
    ``residual``, ``attention`` (an :class:`AttentionView`), ``sublayer``, ``neurons``, ``routing``,
    ``expert_units``; and ``logits``, of the last position ``[B, V]``.
    """

    name: str
    """Name in errors."""
    quantities: Sequence[Quantity]
    """Quantities that it gives."""
    takes_sums = False
    """True if its methods for states, outputs of sublayers and hidden activations take :class:`ActivationSums`."""
    is_solving = False
    """True if its result waits for work that goes on beside the pass: it is asked for last."""

    def hook(self, place: Place) -> Callable[..., None] | None:
        """Return the function for the tensors of a place; None if the metric does not read it."""
        return getattr(self, place, None)

    def passed(self, layer: int) -> None:
        """Note that all batches have passed the embedding (0), or block 1 … L, whose weights can be read now.
        Collective: called on every rank.
        """

    def result(self) -> tuple[Scalars, Arrays]:
        """Return scalars and arrays by their declared names. Collective: call on every rank; each gets the values of
        all.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class MetricSource:
    """A metric class that observes a pass itself, checked but not yet instantiated."""

    name: str
    """Name in errors."""
    quantities: tuple[Quantity, ...]
    make: Callable[[Sizes], Metric]


class SelfObserving(Observed):
    """A metric that has the methods of the places that it reads."""

    def __init__(self, source: MetricSource, setting: Setting) -> None:
        self.name, self.quantities = source.name, source.quantities
        self.metric, self.setting = source.make(setting.sizes), setting
        self.takes_sums = getattr(self.metric, "takes_sums", False)

    @override
    def hook(self, place: Place) -> Callable[..., None] | None:
        return getattr(self.metric, place, None)

    def passed(self, layer: int) -> None:
        """Show the maps of a block's MLP to a metric that reads them."""
        read = getattr(self.metric, "mlp_maps", None)
        if read is not None and layer and (maps := mlp_maps(self.setting.model, layer)) is not None:
            self._show_maps(read, layer, maps)

    def _show_maps(self, read: Callable[..., None], layer: int, maps: tuple[Tensor, Tensor, Tensor | None]) -> None:
        read(layer, *maps)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        return self._named(self.metric.compute())

    def _named(self, values: Any) -> tuple[Scalars, Arrays]:
        """Return arrays by name, with their scalars, and scalars alone."""
        if not isinstance(values, Mapping):
            raise RunError(f"{self.name}: compute gives {type(values).__name__}; give a dict of values by name")
        declared = {quantity.name: quantity for quantity in self.quantities}
        missing = self.setting.missing(self)
        scalars, arrays = Scalars(), Arrays()
        for name, value in values.items():
            array, quantity = _array(value), declared.get(name)
            if array.dtype.kind not in "fiub":
                raise RunError(f"{self.name}: {name} is of type {array.dtype}; give numbers")
            if quantity is None or quantity.has_array:
                # torchmetrics makes a scalar of any tensor of one element.
                squeezed = quantity is not None and array.ndim == 0
                arrays[name] = array.reshape((1,) * len(quantity.axes)) if squeezed and quantity else array
            elif array.size == 1:
                scalars[name] = float(array.reshape(()))
            else:
                raise RunError(f"{self.name}: {name} is declared a scalar, and is an array {list(array.shape)}")
        for name, quantity in declared.items():
            if name in arrays and arrays[name].ndim == len(quantity.axes):
                arrays[name] = blanked(arrays[name], quantity, missing)
            if quantity.scalar and name in arrays:
                scalars[name] = quantity.reduced(arrays[name])
        return scalars, arrays


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    return np.asarray(value)
