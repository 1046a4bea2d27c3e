"""Positional information: each kind may add to the embeddings, rotate queries and keys, or do neither."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .init import Embedding


class NoPositions(nn.Module):
    """No positional information but the causal mask; also the base of the other kinds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x_BTD: Tensor) -> Tensor:
        """Token embeddings with positions added."""
        return x_BTD

    def rotation(self, n_positions: int, device: torch.device) -> Tensor | None:
        """Cosines and sines ``[2, T, d_head/2]``, float32, shared by all blocks; None if this kind rotates nothing."""
        return None


class LearnedPositions(NoPositions):
    """A learned vector per position, added to the token embeddings (GPT-2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table = Embedding(config.max_seq_len, config.d_model)

    def embed(self, x_BTD: Tensor) -> Tensor:
        """Token embeddings plus the first T rows of the table."""
        n_positions, longest = x_BTD.shape[1], self.table.num_embeddings
        if n_positions > longest:
            raise ValueError(f"{n_positions} positions: the learned table holds {longest} (model.max_seq_len)")
        return x_BTD + self.table.weight[:n_positions]


class RotaryPositions(NoPositions):
    """Rotary positions (arXiv 2104.09864): channel pairs (i, i + d_head/2) of queries and keys turn with position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.d_head, self.base = config.d_head, config.rope_base

    def rotation(self, n_positions: int, device: torch.device) -> Tensor:
        """Angles t · base^(−2i/d_head), as cosines and sines."""
        # Computed anew in each forward: it is cheap, and a buffer would have to survive meta construction and sharding.
        exponents = torch.arange(0, self.d_head, 2, device=device, dtype=torch.float64) / self.d_head
        angles = torch.arange(n_positions, device=device, dtype=torch.float64)[:, None] * self.base**-exponents
        return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x_BHTK: Tensor, rotation: Tensor | None) -> Tensor:
    """Turn the channel pairs of queries or keys ``[B, H, T, d_head]`` by the angles of :meth:`NoPositions.rotation`."""
    if rotation is None:
        return x_BHTK
    cos, sin = rotation.to(x_BHTK.dtype)
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


#: Kinds of positional information by name.
POSITIONS: dict[str, type[NoPositions]] = {
    "rope": RotaryPositions,
    "learned": LearnedPositions,
    "none": NoPositions,
}
