"""Memory and messages of a pass under fake tensors: live storages by part, collectives by bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..models.linear_cross_entropy import workspace_bytes

#: Uses of memory. ``gathered``: gathered weights of a sharded model and the buffers of its collectives.
#: ``activations``: everything else: values kept by forward passes for backward passes, and temporaries.
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations")
_GATHERED, _ACTIVATIONS = PARTS.index("gathered"), PARTS.index("activations")

#: Parts of a step, in order. The gradients of the previous step are freed between the forward and the backward pass of
#: the first micro-batch. All later micro-batches are alike.
PHASES = ("first forward", "first backward", "later forward", "later backward", "update")

#: Micro-batch of a pass from which the memory of every other micro-batch follows: a prime so large that a storage whose
#: size has it as a factor grows with the micro-batch.
MANY = 1_000_003


def _workspace_of_flash_backward(d_out: Tensor, q: Tensor, *more: Any, **options: Any) -> int:
    # FlashAttention-2 sums the gradient of the queries in float32, beside a number per row. For keys and values that
    # query heads share it makes a gradient for each head before it sums them.
    shared = 2 * q.numel() * q.itemsize if more[0].numel() != q.numel() else 0
    return 4 * q.numel() + 4 * q.numel() // q.shape[-1] + shared


#: Bytes that fused kernels take while they run, by the operator's name.
WORKSPACE: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _workspace_of_flash_backward,
    "aten::_flash_attention_backward": _workspace_of_flash_backward,
}


def _workspace_of_loss(x: Tensor, weight: Tensor, *more: Any) -> tuple[int, Callable[[int], int]]:
    return x.shape[0], workspace_bytes(x, weight, next(value for value in more if isinstance(value, torch.dtype)))


#: The same of operators that do not take it in proportion to the micro-batch: their rows, and rows → bytes.
WORKSPACE_BY_ROWS: dict[str, Callable[..., tuple[int, Callable[[int], int]]]] = {
    "birthmark::linear_cross_entropy": _workspace_of_loss
}


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class Ring(NamedTuple):
    """Processes of a collective: their number, and the distance between their ranks."""

    size: int
    stride: int = 1


def _ring(group: Any) -> Ring:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    ranks = dist.get_process_group_ranks(group)
    return Ring(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)


def _sent_to_all(tensors: list[Tensor], ring: Ring) -> int:
    return 2 * (ring.size - 1) * _nbytes(tensors) // ring.size


def _sent_in_shards(one: Tensor, other: Tensor) -> int:
    return abs(_nbytes([one]) - _nbytes([other]))


#: The group and the bytes that one process sends, by the collective's name, as a ring sends them: n − 1 of n shards,
#: once to gather or to reduce and scatter, twice to reduce to all.
SENT: dict[str, Callable[..., tuple[Ring, int] | None]] = {
    "c10d::_allgather_base_": lambda whole, part, group, *more: (_ring(group), _sent_in_shards(whole, part)),
    "c10d::_reduce_scatter_base_": lambda part, whole, group, *more: (_ring(group), _sent_in_shards(whole, part)),
    "c10d::allreduce_": lambda tensors, group, *more: (_ring(group), _sent_to_all(tensors, _ring(group))),
    "_c10d_functional::all_reduce": lambda tensor, kind, group: (_ring(group), _sent_to_all([tensor], _ring(group))),
    # (part, processes, group) → the whole: an optimizer that gathers the tensors that it steps.
    "_c10d_functional::all_gather_into_tensor": lambda part, n, group: (
        _ring(group),
        (n - 1) * part.numel() * part.element_size(),
    ),
    "_c10d_functional::wait_tensor": lambda *tensors: None,
}


@dataclass
class _Held:
    alive: weakref.ref[torch.UntypedStorage]
    nbytes: int
    part: int


@dataclass(frozen=True)
class Curve:
    """Bytes held after every operator of a step, by part; those of activations as a function of the micro-batch.

    Attributes:
        fixed: int64 ``[operators, parts]``.
        per_sequence: float64 ``[operators]``, activations on top for each sequence of the micro-batch.
        phases: int8 ``[operators]``, places in :data:`PHASES`.
        reducing: bool ``[operators]``, whether a backward pass has given its first gradient.
        messages: bytes that a process sends in each phase, by the processes that it sends them among.
        messages_per_sequence: the same on top for each sequence of the micro-batch: keys and values of a context group.
        workspaces: bytes of activations on top while some operators run, as functions of the micro-batch, by operator.
    """

    fixed: np.ndarray
    per_sequence: np.ndarray
    phases: np.ndarray
    reducing: np.ndarray
    messages: dict[str, dict[Ring, int]]
    messages_per_sequence: dict[str, dict[Ring, float]]
    workspaces: dict[int, Callable[[int], int]]

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that a process sends in each phase."""
        return {phase: sum(by_ring.values()) for phase, by_ring in self.messages.items()}

    def at(self, micro_batch_size: int) -> np.ndarray:
        """Return the bytes held with this micro-batch, ``[operators, parts]``."""
        held = self.fixed.astype(np.float64)
        held[:, _ACTIVATIONS] += self.per_sequence * micro_batch_size
        for operator, workspace in self.workspaces.items():
            held[operator, _ACTIVATIONS] += workspace(micro_batch_size)
        return held

    def messages_at(self, phase: str, micro_batch_size: int) -> dict[Ring, float]:
        """Return the bytes that a process sends in a phase with this micro-batch."""
        found: dict[Ring, float] = dict(self.messages[phase])
        for ring, n_bytes in self.messages_per_sequence[phase].items():
            found[ring] = found.get(ring, 0.0) + n_bytes * micro_batch_size
        return found

    def during(self, *phases: str) -> np.ndarray:
        """Mark the operators that belong to any of these phases, ``[operators]``."""
        return np.isin(self.phases, [PHASES.index(phase) for phase in phases])


class Ledger(TorchDispatchMode):
    """Dispatch mode that follows every storage of fake tensors from its creation until nothing holds it.

    Args:
        mode: mode of the fake tensors; those of other modes belong to no process.
        micro_batch_size: sequences in a pass; with :data:`MANY`, memory that grows with them is counted separately.
    """

    def __init__(self, mode: FakeTensorMode, micro_batch_size: int) -> None:
        super().__init__()
        self._mode, self._many = mode, micro_batch_size == MANY
        self._held: dict[int, _Held] = {}
        # Parts, then activations of one sequence.
        self._now = [0] * (len(PARTS) + 1)
        self._rows: list[tuple[int, ...]] = []
        self._phases: list[int] = []
        self._reducing: list[bool] = []
        self._workspaces: dict[int, Callable[[int], int]] = {}
        self._messages: dict[str, dict[Ring, int]] = {phase: {} for phase in PHASES}
        self._per_sequence: dict[str, dict[Ring, float]] = {phase: {} for phase in PHASES}
        self._phase: str | None = None
        self._gave_gradients = self._infers = False

    def __enter__(self) -> Ledger:
        """Start; storages that change their size, such as those of gathered weights, are followed too, and whole
        tensors from which torch infers the shapes of a sharded result are not.
        """
        self._resize, self._infer = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if (held := self._held.get(id(storage))) is not None:
                self._count(held, -1)
                held.nbytes, held.part = size, _GATHERED
                self._count(held, 1)
            return result

        def infer(propagator: ShardingPropagator, schema: Any) -> Any:
            self._infers = True
            try:
                return self._infer(propagator, schema)
            finally:
                self._infers = False

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = infer  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._infer  # type: ignore[method-assign]

    def begin(self, phase: str) -> None:
        """Begin a part of the step."""
        self._phase, self._gave_gradients = phase, False

    def gradient(self, tensor: Tensor) -> None:
        """Record a gradient of a backward pass."""
        self.mark([tensor], "gradients")
        self._gave_gradients = True

    def mark(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count the storages of these tensors, or of their local shards, under ``part``."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._file(local.untyped_storage(), PARTS.index(part))

    def curve(self) -> Curve:
        """Return the bytes held since the first phase began."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, len(PARTS) + 1)
        phases, reducing = np.array(self._phases, np.int8), np.array(self._reducing, bool)
        messages = self._messages, self._per_sequence
        return Curve(rows[:, :-1], rows[:, -1] / MANY, phases, reducing, *messages, self._workspaces)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count its outputs from now on."""
        if any(issubclass(kind, DTensor) for kind in types):
            # The operator on the local shard comes here again.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._infers:
            return result
        name = func.name().partition(".")[0]
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
                self._file(tensor.untyped_storage())
        if func.namespace in ("c10d", "_c10d_functional"):
            self._communicate(name, args)
        if func.namespace == "fsdp":
            self.mark(tree_iter(kwargs.get("out", [])), "gathered")
        if self._phase is not None and name in WORKSPACE_BY_ROWS:
            self._workspaces[len(self._rows)] = self._by_micro_batch(*WORKSPACE_BY_ROWS[name](*args, **kwargs))
        if self._phase is not None and func.namespace != "prim":
            self._row(self._phase, WORKSPACE[name](*args, **kwargs) if name in WORKSPACE else 0)
        return result

    def _communicate(self, name: str, args: Any) -> None:
        if name not in SENT:
            raise NotImplementedError(
                f"{name}: the plan does not know how many bytes this collective sends; add it to plan/tracing.py, SENT"
            )
        if self._phase and (message := SENT[name](*args)) is not None:
            ring, n_bytes = message
            if self._grows(n_bytes):
                of_sequence = self._per_sequence[self._phase]
                of_sequence[ring] = of_sequence.get(ring, 0.0) + n_bytes / MANY
            else:
                by_ring = self._messages[self._phase]
                by_ring[ring] = by_ring.get(ring, 0) + n_bytes
        # Weights and their gradients are sent flat; keys and values, which are activations, with their axes.
        if isinstance(args[0], Tensor) and args[0].ndim > 1:
            return
        if name == "c10d::_allgather_base_":
            self._file(args[0].untyped_storage(), _GATHERED)
        if name == "c10d::_reduce_scatter_base_":
            self.gradient(args[0])
            self._file(args[1].untyped_storage(), _GATHERED)

    def _by_micro_batch(self, rows: int, workspace: Callable[[int], int]) -> Callable[[int], int]:
        return (lambda size: workspace(rows // MANY * size)) if self._many else (lambda size: workspace(rows))

    def _row(self, phase: str, workspace: int) -> None:
        row = list(self._now)
        row[-1 if self._grows(workspace) else _ACTIVATIONS] += workspace
        self._rows.append(tuple(row))
        self._phases.append(PHASES.index(phase))
        self._reducing.append(self._gave_gradients)

    def _grows(self, nbytes: int) -> bool:
        return self._many and nbytes > 0 and nbytes % MANY == 0

    def _count(self, held: _Held, sign: int) -> None:
        place = -1 if held.part == _ACTIVATIONS and self._grows(held.nbytes) else held.part
        self._now[place] += sign * held.nbytes

    def _file(self, storage: torch.UntypedStorage, part: int | None = None) -> None:
        key = id(storage)
        held = self._held.get(key)
        if held is None:

            def freed(_: Any) -> None:
                self._count(self._held.pop(key), -1)

            held = self._held[key] = _Held(weakref.ref(storage, freed), storage.nbytes(), _ACTIVATIONS)
            self._count(held, 1)
        if part is not None and part != held.part:
            self._count(held, -1)
            held.part = part
            self._count(held, 1)
