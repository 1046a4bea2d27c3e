"""Keys and values of earlier positions, for text that is generated a token at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config import ModelConfig
from .positions import Eviction, Placement


class LayerCache:
    """Keys (already rotated) and values ``[B, G, S, K]`` of one block, in buffers of their final length. For latent
    attention: the narrow vector behind both, and the key that all heads share.

    Args:
        n_positions: largest number of positions that will be added.
    """

    def __init__(self, n_positions: int) -> None:
        self.n_positions, self.length = n_positions, 0
        self._held: tuple[Tensor, ...] = ()

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the next T positions; return all so far."""
        start = self.length
        if start + k_BGTK.shape[2] > self.n_positions:
            raise ValueError(f"{start + k_BGTK.shape[2]} positions: the cache holds {self.n_positions}")
        if not self._held:
            # The first keys and values give number, width, type and device.
            self._held = tuple(x.new_empty(*x.shape[:2], self.n_positions, x.shape[3]) for x in (k_BGTK, v_BGTK))
        self.length += k_BGTK.shape[2]
        for held, new in zip(self._held, (k_BGTK, v_BGTK), strict=True):
            held[:, :, start : self.length] = new
        k, v = self._held
        return k[:, :, : self.length], v[:, :, : self.length]

    def keep(self, index_S: Tensor) -> None:
        """Drop all positions but these, which are rising indices among the held ones."""
        for held in self._held:
            held[:, :, : len(index_S)] = held[:, :, index_S]
        self.length = len(index_S)


class KeyValueCache:
    """Cache with one :class:`LayerCache` per block.

    Args:
        config: the model.
        n_positions: largest number of positions that will be added.
        eviction: positions to drop, and when; by default none.
    """

    def __init__(self, config: ModelConfig, n_positions: int, eviction: Eviction | None = None) -> None:
        self.layers = [LayerCache(n_positions) for _ in range(config.n_layers)]
        self.eviction = eviction
        self._key_S = torch.zeros(0, dtype=torch.int64)
        self._n_evicted = 0

    @property
    def length(self) -> int:
        """Number of positions so far, dropped ones included."""
        return self._n_evicted + self.layers[0].length

    def placed(self, place: Placement, tokens_BT: Tensor) -> Placement:
        """Return the placement of the next positions, after dropping the keys that none of them sees."""
        if self.eviction is None:
            return place
        first, n_positions = self.length, tokens_BT.shape[1]
        new = torch.arange(first, first + n_positions, device=tokens_BT.device)
        self._key_S = self._key_S.to(tokens_BT.device)
        if first >= self.eviction.after:
            # Keys that the next query does not see are seen by no later query either.
            index_S = self.eviction.seen(new[:1], self._key_S).nonzero()[:, 0]
            for layer in self.layers:
                layer.keep(index_S)
            self._n_evicted += len(self._key_S) - len(index_S)
            self._key_S = self._key_S[index_S]
        self._key_S = torch.cat([self._key_S, new])
        if first + n_positions <= self.eviction.after:
            return place
        return replace(place, eviction=self.eviction, key_S=self._key_S)
