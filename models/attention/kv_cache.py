"""Keys and values of positions already seen, for text that is written a token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig


class LayerCache:
    """One block's keys (already rotated) and values ``[B, G, S, K]``, in buffers of their final length."""

    def __init__(self, k_BGSK: Tensor, v_BGSK: Tensor) -> None:
        self._k, self._v, self.length = k_BGSK, v_BGSK, 0

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Put in the keys and values of the next T positions; all so far are returned."""
        start, longest = self.length, self._k.shape[2]
        if start + k_BGTK.shape[2] > longest:
            raise ValueError(f"{start + k_BGTK.shape[2]} positions: the cache holds {longest}")
        self.length += k_BGTK.shape[2]
        self._k[:, :, start : self.length] = k_BGTK
        self._v[:, :, start : self.length] = v_BGTK
        return self._k[:, :, : self.length], self._v[:, :, : self.length]


class KeyValueCache:
    """One :class:`LayerCache` per block.

    Args:
        config: the model.
        n_sequences: B.
        n_positions: the most positions that will be put in.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_sequences: int,
        n_positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (n_sequences, config.kv_heads, n_positions, config.d_head)
        self.layers = [
            LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in "kv")) for _ in range(config.n_layers)
        ]

    @property
    def length(self) -> int:
        """Positions so far."""
        return self.layers[0].length
