"""The named places inside a decoder that can be looked at. In training the observer is None and costs nothing.

| call | place | shapes |
|---|---|---|
| ``residual("embedding", 0, h)`` | input of the first block | h ``[B, T, d]`` |
| ``residual("attention", l, h)`` | residual stream after the attention of block l, l = 1 … L | h ``[B, T, d]`` |
| ``residual("mlp", l, h)`` | residual stream after the MLP of block l, l = 1 … L | h ``[B, T, d]`` |
| ``attention(l, q, k, o, lse, scale)`` | one attention of block l, l = 1 … L | below |

``q [B, H, T, d_head]`` and ``k [B, H, T, d_head]`` as they enter the scores (rotated, keys repeated to the query
heads); ``o [B, H, T, d_head]`` the value aggregation before any calibration; ``lse [B, H, T]`` the log-sum-exp of
``scale · q·k`` over the keys that each query sees.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Site = Literal["embedding", "attention", "mlp"]


class Observer(Protocol):
    """Receives tensors of a forward pass as it runs; must not change them."""

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """The residual stream at a named place."""

    def attention(
        self, layer: int, q_BHTK: Tensor, k_BHTK: Tensor, o_BHTK: Tensor, lse_BHT: Tensor, scale: float
    ) -> None:
        """One block's attention."""
