"""Optimizer steps: skipped where their gradient is not finite, and their loss and gradient norm kept on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.tensor_shards import shard_of

# ---------------------------------------------------------------- steps that are skipped
# Optimizer steps that change nothing if their gradient is not finite, without a wait for the device.
#
# Weights, the optimizer's moments and step counts, and buffers that the forward pass moved must stay unchanged.
# Zeroed gradients would not do: moments and weight decay move without them.


class UpdateSkippedError(Exception):
    """Signal raised inside the closure of an optimizer's step, so that its update does not happen."""


class StepGuard:
    """Guard that skips steps of one model.

    Args:
        model: the model; its buffers are restored too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[tuple[Tensor, Tensor]] = []
        """Each buffer, with its value at the beginning of the step."""
        self._before: list[tuple[Tensor, Tensor]] = []
        self._skip: Tensor | None = None

    def begin(self) -> None:
        """Begin a step, whose forward passes may move buffers."""
        # Asked for now: a model that is moved to its device gets other tensors.
        self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def put_back(self) -> None:
        """Restore the buffers that passes have moved since the step began."""
        for buffer, before in self._buffers:
            buffer.copy_(before)

    def judge(self, grad_norm: Tensor) -> None:
        """Take the norm of the step's gradient, which is the same on all ranks and lies where the model does."""
        if self._buffers:
            self._skip = ~torch.isfinite(grad_norm)

    @torch.no_grad()
    def hold(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], grad_norm: Tensor, *, wait: bool) -> None:
        """Prepare the coming update to change nothing if the gradient is not finite.

        Args:
            optimizer: torch's optimizer, which has called the closure of its step.
            parameters: all parameters with a gradient.
            grad_norm: norm of the whole gradient, ``[]``.
            wait: the device may be waited for: it has finished its work.

        Raises:
            UpdateSkippedError: the device was waited for, and the update must not take place.
        """
        self.judge(grad_norm)
        entries = [value for of_one in optimizer.state.values() for value in of_one.values()]
        # State that a first step creates cannot be restored; nor can values that are not tensors; nor, without a wait,
        # tensors on another device, such as some step counts on the host. For those the guard waits.
        here = (isinstance(value, Tensor) and value.device == grad_norm.device for value in entries)
        if wait or not entries or not all(here):
            if not torch.isfinite(grad_norm):
                raise UpdateSkippedError
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            # Fused kernels of torch read it: they return at once where it is 1, and take the step count back.
            optimizer.found_inf = (~torch.isfinite(grad_norm)).float()  # type: ignore[attr-defined]
        else:
            self._skip = ~torch.isfinite(grad_norm)
            held = [shard_of(tensor).local for tensor in (*parameters, *entries)]
            self._before = [(tensor, tensor.clone()) for tensor in held]

    @torch.no_grad()
    def settle(self) -> None:
        """End the update: restore everything that it moved in a step to skip."""
        if self._skip is None:
            return
        for tensor, before in (*self._before, *self._buffers):
            tensor.copy_(torch.where(self._skip, before, tensor))
        self._before, self._buffers, self._skip = [], [], None


# ---------------------------------------------------------------- loss and gradient norm of every step
# Loss and gradient norm of every step, which stay on the device until they are read.

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
