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
        """Cosines and sines ``[2, T, r/2]``, float32, shared by all blocks; None if this kind rotates nothing."""
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


class SinusoidalPositions(NoPositions):
    """Fixed sines and cosines added to the token embeddings (arXiv 1706.03762): channels 2i and 2i+1 of position t are
    the sine and cosine of ``t · 10000^(−2i/d)``."""

    def embed(self, x_BTD: Tensor) -> Tensor:
        """Token embeddings plus the waves."""
        angles_TF = _angles(x_BTD.shape[1], x_BTD.shape[2], 10000.0, x_BTD.device)
        return x_BTD + torch.stack([angles_TF.sin(), angles_TF.cos()], dim=-1).flatten(1).to(x_BTD.dtype)


class RotaryPositions(NoPositions):
    """Rotary positions (arXiv 2104.09864): channel pairs (i, i + r/2) of queries and keys turn with position, ``r`` the
    first channels of a head that ``rope_fraction`` names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.d_rope, self.base = config.d_rope, config.rope_base

    def rotation(self, n_positions: int, device: torch.device) -> Tensor:
        """Cosines and sines of the angles."""
        # Computed anew in each forward: it is cheap, and a buffer would have to survive meta construction and sharding.
        angles = _angles(n_positions, self.d_rope, self.base, device)
        return torch.stack([angles.cos(), angles.sin()]).float()


def _angles(n_positions: int, n_channels: int, base: float, device: torch.device) -> Tensor:
    """``t · base^(−2i/n)`` of every position t and channel pair i, float64 ``[T, n/2]``."""
    exponents = torch.arange(0, n_channels, 2, device=device, dtype=torch.float64) / n_channels
    return torch.arange(n_positions, device=device, dtype=torch.float64)[:, None] * base**-exponents


def rotate(x_BHTK: Tensor, rotation: Tensor | None) -> Tensor:
    """Turn the channel pairs of queries or keys ``[B, H, T, d_head]`` by the angles of :meth:`NoPositions.rotation`."""
    if rotation is None:
        return x_BHTK
    cos, sin = rotation.to(x_BHTK.dtype)
    half = cos.shape[-1]
    a, b, still = x_BHTK[..., :half], x_BHTK[..., half : 2 * half], x_BHTK[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, still], dim=-1)


#: Kinds of positional information by name.
POSITIONS: dict[str, type[NoPositions]] = {
    "rope": RotaryPositions,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "none": NoPositions,
}
