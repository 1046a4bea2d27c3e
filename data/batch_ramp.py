"""Growth of the global batch: its size at every step, and the samples before it, as pure functions of the step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

#: Sizes that a ramp may pass through.
_MOST_SIZES = 10_000


@dataclass(frozen=True)
class BatchRamp:
    """Growth of the global batch at the start of a run, like Megatron-LM's ``--rampup-batch-size``."""

    start: int = 0
    """Sequences of the first steps' global batches; 0: all steps have global_batch_size."""

    increment: int = 0
    """Sequences by which the global batch grows at a time, up to global_batch_size."""

    sequences: int = 0
    """Sequences over which it grows: each size is kept for an equal part of them."""

    def problems(self, global_batch_size: int) -> list[str]:
        """List everything that makes this ramp impossible, one line each, with the remedy."""
        if not self.start:
            return [
                f"trainer.batch_ramp.{name} is {value}, but there is no ramp: give trainer.batch_ramp.start too"
                for name, value in (("increment", self.increment), ("sequences", self.sequences))
                if value
            ]
        found = []
        growth = global_batch_size - self.start
        if not 1 <= self.start < global_batch_size:
            found.append(
                f"trainer.batch_ramp.start is {self.start}: give at least 1 and less than trainer.global_batch_size "
                f"{global_batch_size}"
            )
        elif self.increment < 1 or growth % self.increment or growth // self.increment > _MOST_SIZES:
            found.append(
                f"trainer.batch_ramp.increment is {self.increment}: give a number that divides the {growth} sequences "
                f"from start to trainer.global_batch_size, in at most {_MOST_SIZES:,} parts"
            )
        if not 1 <= self.sequences <= 10**15:
            found.append(f"trainer.batch_ramp.sequences is {self.sequences}: give at least 1 and at most 10¹⁵")
        return found


@lru_cache
def _stages(global_batch_size: int, ramp: BatchRamp) -> tuple[tuple[int, int, int], ...]:
    """Return (first step, samples before it, size) for each size of the ramp, in their order."""
    if not ramp.start:
        return ((0, 0, global_batch_size),)
    n_growths = (global_batch_size - ramp.start) // ramp.increment
    stages, step, sample = [], 0, 0
    for growth in range(n_growths):
        size = ramp.start + growth * ramp.increment
        # The first multiple of this size at which the ramp's next part begins.
        steps = max(0, -((sample * n_growths - (growth + 1) * ramp.sequences) // (size * n_growths)))
        if steps:
            stages.append((step, sample, size))
        step, sample = step + steps, sample + steps * size
    return (*stages, (step, sample, global_batch_size))


@dataclass(frozen=True)
class BatchSizes:
    """Size of the global batch at every step."""

    global_batch_size: int
    """Size after the ramp."""
    ramp: BatchRamp = BatchRamp()

    def _stage(self, step: int) -> tuple[int, int, int]:
        stages = _stages(self.global_batch_size, self.ramp)
        return stages[bisect_right(stages, step, key=lambda stage: stage[0]) - 1]

    @property
    def smallest(self) -> int:
        """Smallest size of all steps."""
        return self.ramp.start or self.global_batch_size

    @property
    def sizes(self) -> list[int]:
        """Sizes that occur, in the order of steps."""
        return [size for _, _, size in _stages(self.global_batch_size, self.ramp)]

    def size(self, step: int) -> int:
        """Return the number of sequences of step ``step``, counted from 0."""
        return self._stage(step)[2]

    def before(self, step: int) -> int:
        """Return the number of sequences in all steps before ``step``: the index of its first sample."""
        first, samples, size = self._stage(step)
        return samples + (step - first) * size
