"""Keys and values of positions already seen, for text that is written a token at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config import ModelConfig
from .eviction import Eviction
from .positions import Placement


class LayerCache:
    """One block's keys (already rotated) and values ``[B, G, S, K]``, in buffers of their final length; of
    latent attention what both come from, and the key that all heads share."""

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

    def keep(self, index_S: Tensor) -> None:
        """Let go of all positions but these, counted among those that are held, rising."""
        for kept in (self._k, self._v):
            kept[:, :, : len(index_S)] = kept[:, :, index_S]
        self.length = len(index_S)


class KeyValueCache:
    """One :class:`LayerCache` per block.

    Args:
        config: the model.
        n_sequences: B.
        n_positions: the most positions that will be put in.
        dtype: of keys and values.
        device: where they lie.
        eviction: which of them are let go of, and when; by default none.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_sequences: int,
        n_positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        eviction: Eviction | None = None,
    ) -> None:
        shapes = [(n_sequences, n_heads, n_positions, width) for n_heads, width in config.cached]
        self.layers = [
            LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))
            for _ in range(config.n_layers)
        ]
        self.eviction = eviction
        self._key_S = torch.zeros(0, dtype=torch.int64, device=device)
        self._n_evicted = 0

    @property
    def length(self) -> int:
        """Positions so far, those that were let go of too."""
        return self._n_evicted + self.layers[0].length

    def placed(self, place: Placement, n_positions: int) -> Placement:
        """The placement of the next positions, for which keys may be missing: those that none of them sees are gone."""
        if self.eviction is None:
            return place
        first = self.length
        new = torch.arange(first, first + n_positions, device=self._key_S.device)
        if first >= self.eviction.after:
            # Later queries see none of what the next one does not see.
            index_S = self.eviction.seen(new[:1], self._key_S).nonzero()[:, 0]
            for layer in self.layers:
                layer.keep(index_S)
            self._n_evicted += len(self._key_S) - len(index_S)
            self._key_S = self._key_S[index_S]
        self._key_S = torch.cat([self._key_S, new])
        if first + n_positions <= self.eviction.after:
            return place
        return replace(place, eviction=self.eviction, key_S=self._key_S)
