"""GPUs that a run is planned for: their memory, speed and links."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..trainer.gpu_specs import GPUS
from .tracing import Ring

#: Bytes per second of a GPU's own port to other machines: 400 Gbit/s, eight in a DGX or HGX H100 (its data sheet).
NETWORK = 50e9

#: Share of the bf16 peak that a step runs at, without and with ``torch.compile``: the share of Llama 3.1 8B on eight
#: H100 SXM of 500 W, in model FLOPs (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).
EAGER, COMPILED = 0.34, 0.39

#: Share of the sending between machines that no computing hides. The same page gives the speed of a GPU on 8 and on
#: 128: what it loses is .36 (compiled) and .50 of the planned seconds between machines. Within a machine it is 0, since
#: the shares of the peak, which are of one machine, have it.
EXPOSED = 0.43


@dataclass(frozen=True)
class Cluster:
    """Hardware that a run is planned for.

    Raises:
        UsageError: an impossible value.
    """

    n_gpus: int
    gpu: str
    """A name of :data:`GPUS`; or ``cpu``, processes on this machine, whose times are not known."""
    gpus_per_node: int = 8
    usable: float = 0.92
    """Share of a GPU's memory that is for tensors; the rest is CUDA's, NCCL's, or lost between tensors."""
    mfu: float | None = None
    """Share of the GPU's peak that the operations of a step run at; by default :data:`EAGER` or :data:`COMPILED`."""
    bandwidth: float | None = None
    """Bytes per second that a GPU sends: through its own port where there are several machines (by default
    :data:`NETWORK`), else over its link (by default that of its data sheet)."""
    exposed: float = EXPOSED
    """Share of the sending between machines that no computing hides."""

    def __post_init__(self) -> None:
        if self.gpu != "cpu" and self.gpu not in GPUS:
            raise UsageError(f"--gpu {self.gpu}: give cpu or one of {', '.join(GPUS)}")
        for name, value in (("n_gpus", self.n_gpus), ("gpus_per_node", self.gpus_per_node)):
            if value < 1:
                raise UsageError(f"--{name} {value}: give at least 1")
        if self.n_gpus % self.per_node:
            raise UsageError(
                f"--n_gpus {self.n_gpus} is not a multiple of --gpus_per_node {self.per_node}: give a multiple"
            )
        for name, share in (("usable", self.usable), ("mfu", self.mfu)):
            if share is not None and not 0 < share <= 1:
                raise UsageError(f"--{name} {share}: give a share above 0 and at most 1")
        if not 0 <= self.exposed <= 1:
            raise UsageError(f"--exposed {self.exposed}: give a share from 0 to 1")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth {self.bandwidth / 1e9:g}: give a positive number")

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Device whose kernels are assumed."""
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
    def workspaces(self) -> int:
        """Bytes of workspace that matrix products hold while a process runs: on a GPU the thread of forward passes and
        that of backward passes have some of their own.
        """
        return 0 if self.gpu == "cpu" else 2 * GPUS[self.gpu].workspace

    def leaves_machine(self, ring: Ring) -> bool:
        """Return True if a collective of these processes sends between machines."""
        return (ring.size - 1) * ring.stride >= self.per_node

    def rate(self, ring: Ring) -> float | None:
        """Estimate the bytes per second that a process sends in a collective of these processes; None if unknown.

        Within one machine that is its link. Over several the ring leaves a machine through the ports of all of its
        members there, each for its part of the data, so that the machine sends as fast as its ports together, or as
        its GPUs hand the data on: ``min(link, members · port)``. This is the bus bandwidth of NVIDIA's nccl-tests
        (doc/PERFORMANCE.md), in which the bytes of a ring are counted here. Ports of GPUs that are no members belong to
        the same collective of other groups, which runs at the same time.
        """
        if self.gpu == "cpu":
            return self.bandwidth
        several = self.n_gpus > self.gpus_per_node
        link = GPUS[self.gpu].link if several or self.bandwidth is None else self.bandwidth
        if not self.leaves_machine(ring):
            return link
        return min(link, max(1, self.per_node // ring.stride) * (self.bandwidth or NETWORK))

    def seconds(self, messages: Mapping[Ring, float]) -> float | None:
        """Estimate the seconds for sending these bytes, one collective after another; None if unknown."""
        times = [(n_bytes, self.rate(ring)) for ring, n_bytes in messages.items()]
        known = [n_bytes / rate for n_bytes, rate in times if rate is not None]
        return sum(known) if len(known) == len(times) and (known or self.gpu != "cpu") else None

    def seconds_between(self, messages: Mapping[Ring, float]) -> float:
        """Estimate the seconds of these that are spent between machines; 0 where there is one, or no rate is known."""
        return self.seconds({ring: n for ring, n in messages.items() if self.leaves_machine(ring)}) or 0.0

    def share_of_peak(self, compile: str) -> float:
        """Return the share of its peak at which a GPU runs."""
        return self.mfu if self.mfu is not None else EAGER if compile == "no" else COMPILED

    def speed(self, precision: str, compile: str) -> float | None:
        """Return the FLOP/s of all GPUs at that share of their peak; None if no peak is known."""
        if self.gpu == "cpu" or precision != "bf16":
            return None
        return GPUS[self.gpu].bf16 * self.share_of_peak(compile) * self.n_gpus
