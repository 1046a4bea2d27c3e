"""The GPUs that a run is planned for: their memory, speed and links."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..trainer.gpu_specs import GPUS

#: Bytes per second that a GPU sends to other machines: one port of 400 Gbit/s each.
NETWORK = 50e9


@dataclass(frozen=True)
class Cluster:
    """What a run is planned for.

    Raises:
        UsageError: a value that makes no sense.
    """

    n_gpus: int
    gpu: str
    """A name of :data:`GPUS`; or ``cpu``, processes on this machine, whose times are not known."""
    gpus_per_node: int = 8
    usable: float = 0.92
    """Share of a GPU's memory that is for tensors; the rest is CUDA's, NCCL's, or lost between tensors."""
    mfu: float = 0.4
    """Share of the GPU's peak that the operations of a step run at."""
    bandwidth: float | None = None
    """Bytes per second that a GPU sends; by default its link within one machine, and :data:`NETWORK` beyond."""

    def __post_init__(self) -> None:
        if self.gpu != "cpu" and self.gpu not in GPUS:
            raise UsageError(f"--gpu {self.gpu}: give cpu or one of {', '.join(GPUS)}")
        for name, value in (("n_gpus", self.n_gpus), ("gpus_per_node", self.gpus_per_node)):
            if value < 1:
                raise UsageError(f"--{name} {value}: give at least 1")
        if self.n_gpus % self.per_node:
            raise UsageError(f"--n_gpus {self.n_gpus} is not a multiple of --gpus_per_node {self.per_node}")
        for name, share in (("usable", self.usable), ("mfu", self.mfu)):
            if not 0 < share <= 1:
                raise UsageError(f"--{name} {share}: give a share above 0 and at most 1")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth {self.bandwidth / 1e9:g}: give a positive number")

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What kernels are chosen for."""
        return "cpu" if self.gpu == "cpu" else "cuda"

    @property
    def per_node(self) -> int:
        """Processes on one machine."""
        return min(self.gpus_per_node, self.n_gpus)

    @property
    def memory(self) -> float:
        """Bytes that the tensors of one process may take."""
        if self.gpu == "cpu":
            return self.usable * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.per_node
        return self.usable * GPUS[self.gpu].memory

    @property
    def sends(self) -> float | None:
        """Bytes per second that one process sends; None where that is not known."""
        if self.bandwidth is not None or self.gpu == "cpu":
            return self.bandwidth
        return GPUS[self.gpu].link if self.n_gpus <= self.gpus_per_node else NETWORK

    def speed(self, precision: str) -> float | None:
        """FLOP/s of all GPUs at the stated share of their peak; None where no peak is known."""
        if self.gpu == "cpu" or precision != "bf16":
            return None
        return GPUS[self.gpu].bf16 * self.mfu * self.n_gpus
