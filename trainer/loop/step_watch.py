"""Loss and gradient norm of every step, which stay on the device until they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: So many steps may wait to be read: each keeps two small tensors on the device.
LONGEST = 1024


class SeenStep(NamedTuple):
    """Numbers of a step. The gradient norm covers all ranks, the loss this rank's part of the batch."""

    step: int
    loss: float
    grad_norm: float

    @property
    def skipped(self) -> bool:
        """True if its update was left out. A loss that is not finite makes the gradient so, on all ranks."""
        return not math.isfinite(self.grad_norm)

    @property
    def fault(self) -> str:
        """Name and value of the number that is not finite."""
        name, value = ("gradient norm", self.grad_norm) if math.isfinite(self.loss) else ("loss", self.loss)
        return f"{name} is {value}"


class StepWatch:
    """Collector of each step's numbers, without a wait; reads them all together.

    Args:
        max_skipped: more skipped steps than this are too many.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self.n_skipped = 0
        """Number of skipped steps among all read steps of the run, earlier starts included."""
        self.first_skipped: SeenStep | None = None
        """First skipped step of this start."""
        self._unread: list[tuple[int, Tensor, Tensor]] = []
        self._read: list[SeenStep] = []

    @property
    def full(self) -> bool:
        """True if it is time to :meth:`take`."""
        return len(self._unread) + len(self._read) >= LONGEST

    def see(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Take the scalars of a step; no device is waited for."""
        self._unread.append((step, loss, grad_norm))

    def read(self) -> bool:
        """Read the collected numbers; return True if at most ``max_skipped`` steps were skipped so far. Waits for the
        device.
        """
        if self._unread:
            steps, losses, norms = zip(*self._unread, strict=True)
            self._unread = []
            values = torch.stack([torch.stack(losses).double(), torch.stack(norms).double()]).tolist()
            for seen in map(SeenStep, steps, *values):
                self._read.append(seen)
                if seen.skipped:
                    self.n_skipped += 1
                    self.first_skipped = self.first_skipped or seen
        return self.n_skipped <= self.max_skipped

    def take(self) -> list[SeenStep]:
        """Return all steps since the last take. Waits for the device."""
        self.read()
        taken, self._read = self._read, []
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run. Waits for the device."""
        self.read()
        return {"n_skipped": self.n_skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state` from a checkpoint."""
        self.n_skipped = state["n_skipped"]
