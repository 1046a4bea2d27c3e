"""Named places inside a decoder that an observer can see. In training the observer is None and costs nothing.

| call | place | shapes |
|---|---|---|
| ``residual("embedding", 0, h)`` | input of the first block | h ``[B, T, d]`` |
| ``residual("attention", l, h)`` | residual stream after the attention of block l, l = 1 … L | h ``[B, T, d]`` |
| ``residual("mlp", l, h)`` | residual stream after the MLP of block l, l = 1 … L | h ``[B, T, d]`` |
| ``attention(l, attended)`` | one attention of block l, l = 1 … L | :class:`Attended` |
| ``sublayer("attention", l, x)`` | output of the attention of block l, from its last map | x ``[B, T, d]`` |
| ``sublayer("mlp", l, x)`` | output of the MLP of block l, from its last map | x ``[B, T, d]`` |
| ``neurons(l, a)`` | hidden activations of the MLP of block l, as they enter its down projection | a ``[B, T, d_ff]`` |
| ``routing(l, e)`` | ids of the experts that tokens are sent to, where block l has any | e ``[B, T, k]`` |
| ``expert_units(l, e, a, t)`` | hidden activations of expert e, from 0, and where their R tokens are | a ``[R, F]`` |

``routing`` and ``expert_units`` go only to an observer with a method of that name. A shared expert is not shown.

Blocks of a model may lack a place, or hide it: an :class:`Unseen` records that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from .attention.normalisers import WeightedSum

Site = Literal["embedding", "attention", "mlp"]
Sublayer = Literal["attention", "mlp"]

#: Places that some model may lack → their names in words.
_UNSEEN = {
    "attention": "the attention",
    "neurons": "the hidden units",
    "after_attention": "the residual stream after the attention",
    "attention_output": "the output of the attention",
    "mlp_output": "the output of the MLP",
}
UnseenPlace = Literal["attention", "neurons", "after_attention", "attention_output", "mlp_output"]


def in_ranges(numbers: Sequence[int]) -> str:
    """Put rising numbers in words: ``1–3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


@dataclass(frozen=True)
class Unseen:
    """A place that some blocks of a model do not show; nothing is reported for it."""

    place: UnseenPlace
    """``after_attention`` is ``residual("attention", …)``, the last two are those of ``sublayer``."""
    layers: tuple[int, ...]
    """The blocks, from 1."""
    why: str

    def __str__(self) -> str:
        """Describe it in words, as in snapshots and on the terminal."""
        return (
            f"{_UNSEEN[self.place]} of block{'s' if len(self.layers) > 1 else ''} {in_ranges(self.layers)} ({self.why})"
        )


@dataclass(frozen=True)
class Attended:
    """Tensors of one attention, from queries, keys and values to the input of the output projection, all ``[B, H, T,
    d_head]``.

    In latent attention (DeepSeek), values and outputs differ in width from queries and keys.
    """

    q_BHTK: Tensor
    """Queries as they enter the scores (rotated)."""
    k_BHTK: Tensor
    """Keys as they enter the scores (rotated, repeated to the query heads)."""
    v_BHTK: Tensor
    """Values, repeated to the query heads."""
    o_BHTK: Tensor
    """The value aggregation ``Σ a·v`` before norm, calibration and gate."""
    out_BHTK: Tensor
    """The same after them, with an adapter's contribution: the input of the output projection."""
    weights: WeightedSum
    """Rows of weights on demand, and their sums."""


class Observer(Protocol):
    """Observer that receives tensors of a forward pass as it runs; must not change them."""

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """Receive the residual stream at a named place."""

    def attention(self, layer: int, attended: Attended) -> None:
        """Receive one block's attention."""

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Receive the hidden activations of one block's MLP."""


class NeuronObserver(Protocol):
    """The part of an observer that an MLP calls."""

    def neurons(self, layer: int, a: Tensor) -> None:
        """Receive hidden activations."""


def show_residual(observer: Observer | None, site: Site, layer: int, h_BTD: Tensor) -> None:
    """Show a place of the residual stream to the observer, if there is one."""
    if observer is not None:
        observer.residual(site, layer, h_BTD)


@runtime_checkable
class SublayerObserver(Protocol):
    """An observer that receives outputs of sublayers too."""

    def sublayer(self, site: Sublayer, layer: int, x_BTD: Tensor) -> None:
        """Receive the output of a block's attention or MLP, before a norm after it and the sum with the residual
        stream.
        """


def show_sublayer(observer: Observer | None, site: Sublayer, layer: int, x_BTD: Tensor) -> None:
    """Show a sublayer's output to an observer that reads it. A difference of states would carry their rounding: in
    bfloat16, a massive channel makes it worthless.
    """
    # Asking a protocol costs as much as a small product: not where nobody looks.
    if observer is not None and isinstance(observer, SublayerObserver):
        observer.sublayer(site, layer, x_BTD)


@runtime_checkable
class RoutingObserver(Protocol):
    """An observer that receives the choices of routers too."""

    def routing(self, layer: int, chosen_BTK: Tensor) -> None:
        """Receive the ids of the experts that each token of one block is sent to."""


def show_routing(observer: Observer | None, layer: int, chosen_BTK: Tensor) -> None:
    """Show a router's choices to an observer that reads them."""
    if observer is not None and isinstance(observer, RoutingObserver):
        observer.routing(layer, chosen_BTK)


@runtime_checkable
class ExpertObserver(Protocol):
    """An observer that receives the hidden activations of experts too."""

    def expert_units(self, layer: int, expert: int, a_RF: Tensor, position_R: Tensor) -> None:
        """Receive the hidden activations of one expert for its tokens of a batch, and the tokens' positions. An expert
        without tokens may not be shown.
        """
