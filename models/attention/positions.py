"""Positional information: each kind may add to the embeddings, rotate queries and keys, or add to the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..dropout import Dropout
from ..init import Embedding, ParameterRole
from .context_parallel import Chunk, ContextGroup
from .document_mask import Documents
from .rotation import turning


@dataclass(frozen=True)
class Eviction:
    """Eviction of keys: queries from position ``after`` on do not see all keys before them (StreamingLLM, arXiv
    2309.17453).

    Earlier queries see all keys. An evicted key takes its value with it; the other keys keep their positions, rotation
    included.
    """

    after: int
    """First position that keys are missing for."""
    first: int = 0
    """Number of missing keys, from position 0 on."""
    window: int | None = None
    """Number of keys up to its own that a query sees, beside those of ``kept``; None: all."""
    kept: int = 0
    """Keys from position 0 on that a window leaves where they are, but for the ``first`` ones."""

    def seen(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True where a query at one position may see a key before it at another; broadcast together, bool."""
        stays = key >= self.first
        if self.window is not None:
            stays = stays & ((key > query - self.window) | (key < self.kept))
        return stays | (query < self.after)


# ---------------------------------------------------------------- positional information
# Each kind may add to the embeddings, rotate queries and keys, or add to the scores.


@dataclass(frozen=True)
class Placement:
    """State of a forward pass that its blocks need: positions, visible keys, and dropout."""

    first: int = 0
    """Position of the first query; those before it lie in the cache."""
    rotation: Tensor | None = None
    """Rotation of queries and keys (:func:`.rotation.turning`) ``[2, T, r]``, or ``[2, B, 1, T, r]`` for sequences of
    several documents, float32.
    """
    slopes_H: Tensor | None = None
    """Penalty of each head on its scores per position of distance."""
    bias_HS: Tensor | None = None
    """Addition of each head to a score by distance ``|t − j|``, 0 … S − 1."""
    documents: Documents | None = None
    """Documents, if a query sees only its own document and positions count within it; None if each sequence is one."""
    eviction: Eviction | None = None
    """Eviction that hides keys from these queries; None if all are present."""
    dropout: Dropout | None = None
    """Masks of a training pass; None where nothing is dropped."""
    key_S: Tensor | None = None
    """Positions of the keys, those of the queries last, int64; None where they are 0, 1, …"""
    context: ContextGroup | None = None
    """Group whose processes hold parts of these sequences; documents and biases by distance are those of the whole."""
    is_chunk: bool = False
    """True for neighbouring positions that do not begin a sequence, with the keys of all positions up to the last."""
    seen_by_one: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict, init=False, compare=False)
    """Keys that a single query sees, by window and prefix: computed in one block for all others."""

    def without_positions(self) -> Placement:
        """Return the same visible keys, without rotation and without additions to scores."""
        return replace(self, rotation=None, slopes_H=None, bias_HS=None)

    def positions(self, n_queries: int, device: torch.device) -> Tensor:
        """Return the queries' positions, int64 ``[T]``; positions within documents, ``[B, T]``, if there are any. Those
        of this process's part, in a context group.
        """
        if self.documents is not None:
            position_BT = self.documents.position_BT
            return position_BT if self.context is None else self.context.part(position_BT)
        if self.context is not None:
            return self.context.positions(n_queries * self.context.size, device)
        return torch.arange(self.first, self.first + n_queries, device=device)

    @property
    def n_parts(self) -> int:
        """Number of processes that hold parts of these sequences."""
        return 1 if self.context is None else self.context.size

    def chunk(self, chunk: Chunk) -> Placement:
        """Return the placement of a chunk of this process's part, whose queries and keys have been rotated."""
        documents = None if self.documents is None else self.documents.until(chunk.stop)
        return replace(
            self, first=chunk.first, rotation=None, documents=documents, context=None, is_chunk=chunk.first > 0
        )


class NoPositions(nn.Module):
    """No positional information but the causal mask; also the base of the other kinds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x_BTD: Tensor, place: Placement) -> Tensor:
        """Add positions to token embeddings ``[B, T, D]`` of these places."""
        return x_BTD

    def place(
        self,
        n_positions: int,
        device: torch.device,
        first: int = 0,
        documents: Documents | None = None,
        context: ContextGroup | None = None,
    ) -> Placement:
        """Return the placement of positions ``first`` … ``first + n_positions − 1``, or of as many that are this
        process's part.
        """
        return self._placed(Placement(first, documents=documents, context=context), n_positions, device)

    def _placed(self, place: Placement, n_positions: int, device: torch.device) -> Placement:
        """Add to a placement what this kind gives attention."""
        return place


class LearnedPositions(NoPositions):
    """A learned vector per position, added to the token embeddings (GPT-2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.table = Embedding(config.max_seq_len, config.d_model)

    def embed(self, x_BTD: Tensor, place: Placement) -> Tensor:
        """Add the positions' rows of the table to token embeddings."""
        end = place.first + x_BTD.shape[1] * place.n_parts
        longest = self.table.num_embeddings
        if end > longest:
            raise ValueError(f"{end} positions: the learned table holds {longest} (model.max_seq_len)")
        return x_BTD + self.table(place.positions(x_BTD.shape[1], x_BTD.device))


class SinusoidalPositions(NoPositions):
    """Fixed sines and cosines added to the token embeddings (arXiv 1706.03762): channels 2i and 2i+1 of position t are
    the sine and cosine of ``t · 10000^(−2i/d)``."""

    def embed(self, x_BTD: Tensor, place: Placement) -> Tensor:
        """Add the waves to token embeddings."""
        angles = _angles(place.positions(x_BTD.shape[1], x_BTD.device), x_BTD.shape[2], 10000.0)
        return x_BTD + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(x_BTD.dtype)


class RotaryPositions(NoPositions):
    """Rotary positions (arXiv 2104.09864): channel pairs (i, i + r/2) of queries and keys turn with position, ``r`` the
    first channels of a head that ``rope_fraction`` names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.d_rope, self.base = config.d_rope, config.rope_base

    def _placed(self, place: Placement, n_positions: int, device: torch.device) -> Placement:
        # Computed anew in each forward: it is cheap, and a buffer would have to survive meta construction and sharding.
        angles = _angles(place.positions(n_positions, device), self.d_rope, self.base)
        rotation = turning(angles).float()
        return replace(place, rotation=rotation if place.documents is None else rotation.unsqueeze(2))


class AlibiPositions(NoPositions):
    """Scores minus slope · distance (arXiv 2108.12409). The slopes of 2ⁿ heads are ``2^(−8/2ⁿ · i)``, i = 1, 2, …;
    other numbers of heads take those of the power of two below, then every other one of the power above."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.n_heads, self.whole = config.n_heads, 2 ** math.floor(math.log2(config.n_heads))

    def _placed(self, place: Placement, n_positions: int, device: torch.device) -> Placement:
        # Computed on the device: a list of Python's would be copied to it in each forward, which waits for it.
        n = torch.arange(1, self.n_heads + 1, device=device, dtype=torch.float64)
        steps_H = torch.where(n <= self.whole, 8 / self.whole * n, 4 / self.whole * (2 * (n - self.whole) - 1))
        return replace(place, slopes_H=torch.exp2(-steps_H).float())


class T5Positions(NoPositions):
    """Scores plus a learned number per head and bucket of distances (arXiv 1910.10683), shared by all blocks.

    The first half of the buckets hold one distance each, the others ranges that grow geometrically up to
    ``t5_max_distance``, from which on all share the last.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.max_distance = config.t5_max_distance
        # Its rows are added to scores: a bias of each head.
        self.table = Embedding(config.t5_buckets, config.n_heads, ParameterRole.BIAS)

    def _placed(self, place: Placement, n_positions: int, device: torch.device) -> Placement:
        n_buckets = self.table.num_embeddings
        single = n_buckets // 2
        n_distances = place.first + n_positions * place.n_parts
        distance = torch.arange(n_distances, device=device, dtype=torch.float64).clamp_min(1)
        ranges = (distance / single).log() / math.log(self.max_distance / single) * (n_buckets - single)
        far = (single + ranges.clamp_min(0).long()).clamp_max(n_buckets - 1)
        near = torch.arange(n_distances, device=device)
        return replace(place, bias_HS=self.table(torch.where(near < single, near, far)).T)


def _angles(position: Tensor, n_channels: int, base: float) -> Tensor:
    """Compute ``t · base^(−2i/n)`` of every position t and channel pair i, float64 ``[…, T, n/2]``."""
    exponents = torch.arange(0, n_channels, 2, device=position.device, dtype=torch.float64) / n_channels
    return position.double()[..., None] * base**-exponents


#: Kinds of positional information by name.
POSITIONS: dict[str, type[NoPositions]] = {
    "rope": RotaryPositions,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "alibi": AlibiPositions,
    "t5": T5Positions,
    "none": NoPositions,
}
