"""The content of a checkpoint in one pass, a tensor at a time: its digests, and the sampled values that tell kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...models.birth import Digest
from ...models.by_block.block_weights import BlockWeights
from ..weight_samples import sampled_values

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Content:
    """Of a checkpoint."""

    float32: str
    """Digest of its values (definitions §1, with the buffers, if the model has any)."""
    bfloat16: str
    """Of its values rounded to bfloat16."""
    float16: str
    """Of its values rounded to float16."""
    values: dict[str, np.ndarray] = field(repr=False)
    """Sampled, of tensors of two axes or more (weight_samples.py)."""


class Reading:
    """Digests and samples of tensors that are shown one after another, in name order."""

    def __init__(self) -> None:
        self._digests = {dtype: Digest() for dtype in (torch.float32, torch.bfloat16, torch.float16)}
        self.values: dict[str, np.ndarray] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor, whole, on the CPU."""
        for dtype, sha in self._digests.items():
            sha.add(name, tensor.to(dtype).float().numpy())
        if tensor.ndim > 1:
            self.values[name] = sampled_values(name, tensor)

    def content(self) -> Content:
        """Of all that was added."""
        float32, bfloat16, float16 = (sha.hexdigest() for sha in self._digests.values())
        return Content(float32, bfloat16, float16, self.values)


def content_of(shapes: Shapes, weights: BlockWeights) -> Content:
    """Read all of a model's tensors.

    Args:
        shapes: their names, in order.
        weights: where they are.

    Raises:
        RunError: a file is missing or damaged, or has no such tensor.
    """
    reading = Reading()
    for name in shapes:
        ((_, tensor),) = weights.read([name])
        reading.add(name, tensor)
    return reading.content()
