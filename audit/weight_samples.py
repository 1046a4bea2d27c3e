"""A thousandth of a checkpoint's values: the same places of every checkpoint, so that two can be compared without
reading them whole; and, if all may be read, values that no training produces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..files import content_digest
from .weights import DTYPES, WEIGHT_TYPES, Entry, Weights

#: Length of runs of neighbouring values that are read together; share of a tensor that is read, one in so many; least
#: and largest number of runs.
RUN_LENGTH, ONE_IN, FEWEST_RUNS, MOST_RUNS = 64, 1000, 16, 1024
#: Values that are looked at together where all are: small enough for the memory to be used again.
_CHUNK = 1 << 20
#: A value of so many times the tensor's median is none that training makes.
HUGE = 1e5


@dataclass(frozen=True)
class Sampled:
    """Sampled content of a checkpoint."""

    entries: dict[str, Entry]
    digests: dict[str, str]
    """SHA-256 of each tensor's shape, type and sampled bytes: alike where the weights are, as far as was read."""
    values: dict[str, np.ndarray]
    """Samples of floating tensors of two axes or more, float32 ``[runs, RUN_LENGTH]``; a small one whole, ``[1,
    numel]``.
    """
    bytes_read: int
    n_bytes: int
    """Bytes of all tensors."""
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    """Floating tensors of one axis, gains and biases, in the form of ``values``."""
    broken: list[str] = field(default_factory=list)
    """Values that are NaN, inf or huge, in words."""

    @property
    def spreads(self) -> dict[str, float]:
        """Standard deviation of the values of each vector; exactly 0 if all are alike."""
        return {
            name: float(values.std(dtype=np.float64)) if np.ptp(values) > 0 else 0.0
            for name, values in self.vectors.items()
            if values.size > 1
        }

    @property
    def digest(self) -> str:
        """Digest of all tensors by name."""
        return content_digest(self.digests)


def run_starts(name: str, numel: int) -> list[int]:
    """Return the starts of a tensor's sampled runs; only its name and size decide them. A small tensor is one run."""
    n = min(max(numel // (ONE_IN * RUN_LENGTH), FEWEST_RUNS), MOST_RUNS)
    if numel <= 2 * n * RUN_LENGTH:
        return []
    seed = int.from_bytes(hashlib.sha256(f"{name}\0{numel}".encode()).digest()[:8], "little")
    drawn = np.random.Generator(np.random.Philox(key=seed)).integers(0, numel - RUN_LENGTH, n)
    return sorted({int(start) for start in drawn})


def _spans(name: str, numel: int) -> list[tuple[int, int]]:
    return [(start, start + RUN_LENGTH) for start in run_starts(name, numel)] or [(0, numel)]


def _sound(parts: list[Tensor]) -> tuple[np.ndarray, float]:
    """Convert parts of a floating tensor to the form of `Sampled.values`; return them with the median of their
    sizes.
    """
    found = torch.stack([part.float() for part in parts])
    median = float(found[found.isfinite()].abs().median().nan_to_num())
    # One broken value would decide every distance.
    return found.where(found.isfinite() & (found.abs() <= HUGE * (median or 1.0)), 0.0).numpy(), median


def sampled_values(name: str, tensor: Tensor) -> np.ndarray:
    """Sample a tensor in memory like `sample`: float32 ``[runs, RUN_LENGTH]``, a small one whole."""
    flat = tensor.detach().reshape(-1)
    return _sound([flat[start:stop] for start, stop in _spans(name, flat.numel())])[0]


def sample(weights: Weights, *, scan: bool) -> Sampled:
    """Sample a checkpoint.

    Args:
        weights: weights of the checkpoint.
        scan: read all values, and look for those that are broken.

    Raises:
        RunError: a file cannot be read.
    """
    digests: dict[str, str] = {}
    values: dict[str, np.ndarray] = {}
    vectors: dict[str, np.ndarray] = {}
    broken, n_read = [], 0
    for name in sorted(weights.entries):
        entry = weights.entries[name]
        sha = hashlib.sha256(str(entry).encode())
        parts = [weights.read(name, *span) for span in _spans(name, entry.numel)]
        for part in parts:
            sha.update(part.view(torch.uint8).numpy().tobytes())
            n_read += part.numel() * part.element_size()
        digests[name] = sha.hexdigest()
        if entry.dtype not in WEIGHT_TYPES or not entry.numel:
            continue
        sound, median = _sound(parts)
        (values if len(entry.shape) > 1 else vectors)[name] = sound
        if scan:
            broken += _broken(name, weights, entry, median)
    n_bytes = sum(entry.nbytes for entry in weights.entries.values())
    return Sampled(dict(weights.entries), digests, values, n_read, n_bytes, vectors, broken)


def chunks(weights: Weights, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor in parts, each with the place of its first value."""
    numel = weights.entries[name].numel
    for start in range(0, numel, _CHUNK):
        yield start, weights.read(name, start, min(start + _CHUNK, numel))


class _Bits(NamedTuple):
    """Reading of a floating type as whole numbers: without the sign, the larger number is the larger value."""

    type: torch.dtype
    without_sign: int
    inf: int
    """Bits of infinity; larger ones are NaN."""


_BITS: Mapping[torch.dtype, _Bits] = {
    torch.bfloat16: _Bits(torch.int16, 0x7FFF, 0x7F80),
    torch.float16: _Bits(torch.int16, 0x7FFF, 0x7C00),
    torch.float32: _Bits(torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
}


def _may_be_broken(name: str, weights: Weights, median: float) -> bool:
    """Return True if a tensor may hold a value that is huge or not finite; rare types are not checked here."""
    dtype = DTYPES[weights.entries[name].dtype]
    if (bits := _BITS.get(dtype)) is None:
        return True
    largest = 0
    for _, part in chunks(weights, name):
        whole = part.view(bits.type).numpy()
        largest = max(largest, int(np.bitwise_and(whole, whole.dtype.type(bits.without_sign)).max()))
    value = float(torch.tensor(largest, dtype=bits.type).view(dtype))
    return largest >= bits.inf or value > HUGE * (median or 1.0)


def _broken(name: str, weights: Weights, entry: Entry, median: float) -> list[str]:
    if not _may_be_broken(name, weights, median):
        return []
    n_not_finite, largest, at = 0, 0.0, 0
    for start, part in chunks(weights, name):
        sizes = part.float().abs()
        finite = sizes.isfinite()
        n_not_finite += int((~finite).sum())
        sizes[~finite] = 0
        if float(sizes.max()) > largest:
            largest, at = float(sizes.max()), start + int(sizes.argmax())
    found = []
    if n_not_finite:
        found.append(f"{name} has {n_not_finite:,} NaN or inf")
    # A tensor of zeros has no scale to be huge against but that of weights.
    if largest > HUGE * (median or 1.0):
        place = [int(i) for i in np.unravel_index(at, entry.shape)]
        found.append(f"{name}{place} is {largest:.3g} in size, where the median is {median:.2g}")
    return found


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints whose samples are alike."""

    n_values: int
    n_all: int
    first: str
    """The first value that differs."""


def exact_difference(a: Weights, b: Weights) -> Difference | None:
    """Compare all bytes of two checkpoints with the same tensors; None if they are alike."""
    n, total, first = 0, 0, ""
    for name, entry in sorted(a.entries.items()):
        total += entry.numel
        for (start, of_a), (_, of_b) in zip(chunks(a, name), chunks(b, name), strict=True):
            size = of_a.element_size()
            differs = (of_a.view(torch.uint8).view(-1, size) != of_b.view(torch.uint8).view(-1, size)).any(1)
            if bool(differs.any()):
                if not n:
                    place = start + int(differs.int().argmax())
                    first = f"{name}{[int(i) for i in np.unravel_index(place, entry.shape)]}"
                n += int(differs.sum())
    return Difference(n, total, first) if n else None
