"""Initial values: distributions, the initialisers that choose them, their layers, and the roles of parameters."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ..kernel_devices import trains_on_cpu
from .config import InitConfig

# ---------------------------------------------------------------- random generators by key


def keyed_generator(init_seed: int, *parts: object) -> np.random.Generator:
    """Return a Philox generator keyed by a hash of ``init_seed`` and ``parts``. Content and order of the hashed text
    are a file format.
    """
    name = "\0".join(["birthmark/1", str(init_seed), *map(str, parts)])
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(key=words))


# ---------------------------------------------------------------- roles of parameters


class ParameterRole(StrEnum):
    """Role of a parameter in a pass."""

    MATRIX = "matrix"
    """A matrix that maps vectors to vectors."""
    EMBEDDING = "embedding"
    """Table of vectors, of tokens or of positions."""
    HEAD = "head"
    """The map from the residual stream to the logits of all tokens."""
    GAIN = "gain"
    """Factors that scale their input."""
    DECAYED_GAIN = "decayed_gain"
    """Factors that scale their input and decay with the matrices, as the authors of the arm train them."""
    BIAS = "bias"
    """A term added to an output, to a score, or to a gate's input; or a key or value of its own."""


@runtime_checkable
class StatesRoles(Protocol):
    """A module that states the role of each of its own parameters."""

    parameter_roles: Mapping[str, ParameterRole]
    """Role of each parameter owned directly, by its name inside the module."""


def name_below(module: str, name: str) -> str:
    """Return the full name of a tensor of a module, itself named as in ``named_modules``: ``""`` for the root."""
    return f"{module}.{name}" if module else name


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter of ``model`` by full name, in the order of ``named_parameters``.

    Raises:
        TypeError: a module owns parameters but does not state their roles.
        ValueError: it states one that is none.
    """
    roles: dict[str, ParameterRole] = {}
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        stated = module.parameter_roles if isinstance(module, StatesRoles) else {}
        if missing := [name for name in own if name not in stated]:
            raise TypeError(f"{type(module).__name__} owns parameters {missing} but does not state their roles")
        roles |= {name_below(prefix, name): ParameterRole(stated[name]) for name in own}
    return {name: roles[name] for name, _ in model.named_parameters()}


# ---------------------------------------------------------------- initialisation
# Distributions of parameters, the initialisers that choose them, and the layers that own them.

# ------------------------------------------------------------------------------------------------------------------
# Distributions


class Normals(Protocol):
    """Source of the standard normals for one block of a parameter."""

    def __call__(self, n: int, again: int = 0) -> np.ndarray:
        """Return the first ``n`` normals of the block's stream, or of its ``again``-th further one, float32."""


class Distribution:
    """Distribution of a parameter, drawn block by block."""

    #: True if an element depends on all others, so that a slice needs the whole parameter.
    whole = False

    @property
    def spread(self) -> float:
        """Standard deviation of one element."""
        raise NotImplementedError

    def block(self, normals: Normals, n: int) -> np.ndarray:
        """Draw the first ``n`` elements of a block, float32; they do not depend on the number that follow."""
        raise NotImplementedError

    def finish(self, values: np.ndarray) -> np.ndarray:
        """Map the elements of all blocks together to the parameter's values."""
        return values


@dataclass(frozen=True)
class Constant(Distribution):
    """Distribution with one value everywhere."""

    value: float

    @property
    @override
    def spread(self) -> float:
        return 0.0

    @override
    def block(self, normals: Normals, n: int) -> np.ndarray:
        return np.full(n, self.value, dtype=np.float32)


@dataclass(frozen=True)
class Normal(Distribution):
    """Normal distribution with mean 0."""

    std: float

    @property
    @override
    def spread(self) -> float:
        return self.std

    @override
    def block(self, normals: Normals, n: int) -> np.ndarray:
        values = normals(n)
        values *= np.float32(self.std)
        return values


@dataclass(frozen=True)
class TruncatedNormal(Distribution):
    """Normal distribution with mean 0 and standard deviation ``std``, truncated at ± ``truncate`` · std.

    Elements beyond the bound are drawn anew, in their order, from further streams of their block; all others are those
    of :class:`Normal` under the same seed and name.
    """

    std: float
    truncate: float

    @property
    def spread(self) -> float:
        """Standard deviation of the truncated distribution, below ``std``."""
        density = math.exp(-(self.truncate**2) / 2) / math.sqrt(2 * math.pi)
        return self.std * math.sqrt(1 - 2 * self.truncate * density / math.erf(self.truncate / math.sqrt(2)))

    @override
    def block(self, normals: Normals, n: int) -> np.ndarray:
        values, bound = normals(n), np.float32(self.truncate)
        again, beyond = 0, np.flatnonzero(np.abs(values) > bound)
        while beyond.size:
            again += 1
            fresh = normals(beyond.size, again)
            values[beyond] = fresh
            beyond = beyond[np.abs(fresh) > bound]
        values *= np.float32(self.std)
        return values


@dataclass(frozen=True)
class Orthogonal(Distribution):
    """Matrix ``[rows, columns]`` with orthonormal rows (if it is wide) or columns, uniform over all such matrices.

    It is Q of the QR decomposition of a matrix of keyed normals, in float64 and with the diagonal of R positive
    (arXiv math-ph/0609050), rounded to float32. One thread computes it, so that it is bit for bit the same on one
    machine whatever the thread count; another machine's LAPACK may differ in the last bit of some elements. A slice
    costs the whole matrix.
    """

    rows: int
    columns: int
    whole = True

    @property
    @override
    def spread(self) -> float:
        return max(self.rows, self.columns) ** -0.5

    @override
    def block(self, normals: Normals, n: int) -> np.ndarray:
        return normals(n)

    @override
    def finish(self, values: np.ndarray) -> np.ndarray:
        matrix = torch.from_numpy(values).view(self.rows, self.columns).double()
        wide = self.rows < self.columns
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            q, r = torch.linalg.qr(matrix.T if wide else matrix)
        finally:
            torch.set_num_threads(n_threads)
        q *= r.diagonal().sign()
        return (q.T if wide else q).float().contiguous().view(-1).numpy()


# ------------------------------------------------------------------------------------------------------------------
# Initialisers


@dataclass(frozen=True)
class Fans:
    """Fan-in and fan-out of a matrix, for initialisers."""

    fan_in: int
    fan_out: int
    residual_writers: int | None = None
    """Number of maps that write to the residual stream, for one of them; None for all other matrices."""


#: Initialisers by name: (config, fans of the matrix) → distribution.
INITIALISERS: dict[str, Callable[[InitConfig, Fans], Distribution]] = {
    "fan_in": lambda config, fans: Normal(fans.fan_in**-0.5),
    "normal": lambda config, fans: Normal(config.std),
    "truncated_normal": lambda config, fans: TruncatedNormal(config.std, config.truncate),
    "gpt2": lambda config, fans: Normal(config.std * (fans.residual_writers or 1) ** -0.5),
    "xavier": lambda config, fans: Normal((2 / (fans.fan_in + fans.fan_out)) ** 0.5),
    "kaiming": lambda config, fans: Normal((2 / fans.fan_in) ** 0.5),
    "orthogonal": lambda config, fans: Orthogonal(fans.fan_out, fans.fan_in),
}


def for_tables(init: InitConfig) -> InitConfig:
    """Adapt the config for tables of vectors, which map nothing: a normal with 1/√width replaces an orthogonal
    matrix.
    """
    return replace(init, kind="fan_in") if init.kind == "orthogonal" else init


@runtime_checkable
class StatesBirth(Protocol):
    """A module that states the distribution of each of its own parameters."""

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Return the distribution of each parameter owned directly, by its name inside the module."""


# ------------------------------------------------------------------------------------------------------------------
# Layers


class Linear(nn.Linear):
    """A linear map ``[…, in_features] → […, out_features]``; its bias starts at 0.

    ``residual_writers`` marks a map that writes to the residual stream: see :class:`Fans`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, residual_writers: int | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.parameter_roles = {"weight": ParameterRole.MATRIX, "bias": ParameterRole.BIAS}
        self.fans = Fans(in_features, out_features, residual_writers)
        #: Module of an adapter, whose output for the input is added (models/adapters).
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply :meth:`product`, and add an adapter's output if there is one."""
        y = self.product(x)
        return y if self.adapter is None else y + self.adapter(x)

    def product(self, x: Tensor) -> Tensor:
        """Multiply in the dtype of ``x``, or of autocast: a strategy may have gathered the weights in a narrower one.

        Training replaces this method to multiply in another way; a subclass's forward pass calls it too.
        """
        if self.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`StatesBirth`."""
        return {"weight": INITIALISERS[init.kind](init, self.fans), "bias": Constant(0.0)}


class _Rows(torch.autograd.Function):
    """Autograd function of a table's rows, and of the table for another reader, to whose gradient it adds that of the
    rows. On a CPU torch's own gradient of rows takes five times as long, and the sum of two tables' one more pass.
    """

    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.shape = table_VD.shape
        return F.embedding(ids, table_VD), table_VD.view_as(table_VD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor | None, d_table_VD: Tensor | None) -> tuple[Tensor | None, None]:
        if d is None:
            return d_table_VD, None
        d_table_VD = d.new_zeros(ctx.shape) if d_table_VD is None else d_table_VD
        return d_table_VD.index_add_(0, ctx.saved_tensors[0].flatten(), d.flatten(0, -2)), None


def read_rows(table_VD: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of int64 ids, ``[…] → […, D]``, and the table for another reader."""
    if trains_on_cpu(table_VD):
        both: tuple[Tensor, Tensor] = _Rows.apply(table_VD, ids)
        return both
    return F.embedding(ids, table_VD), table_VD


class Embedding(nn.Embedding):
    """A table of vectors. Its fan-in is its width, as for a table that serves as the output head.

    ``role`` says what its rows are for, where they are no vectors that enter the residual stream.
    """

    def __init__(self, n_rows: int, width: int, role: ParameterRole = ParameterRole.EMBEDDING) -> None:
        super().__init__(n_rows, width)
        self.parameter_roles = {"weight": role}

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of int64 ids, ``[…] → […, width]``."""
        return read_rows(self.weight, ids)[0]

    def with_table(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids, and the table for the output head of the same pass."""
        # Hooks see a call of the module, and may take the table away behind it (ZeRO 3): a view would keep it.
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return self(ids), self.weight
        return read_rows(self.weight, ids)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`StatesBirth`."""
        init = for_tables(init)
        return {"weight": INITIALISERS[init.kind](init, Fans(self.embedding_dim, self.num_embeddings))}


# ------------------------------------------------------------------------------------------------------------------
# The plan of a whole model


def birth_plan(model: nn.Module, init: InitConfig) -> dict[str, Distribution]:
    """Return the distribution of every parameter of ``model`` by full name; tied parameters appear once.

    Raises:
        TypeError: a module owns parameters but does not state their distributions.
    """
    plan: dict[str, Distribution] = {}
    names = {name for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        if not isinstance(module, StatesBirth):
            raise TypeError(f"{type(module).__name__} owns parameters {own} but does not state their distributions")
        # Experts are parts of the MLP as a dense one's maps are.
        part = re.sub(r"^mlp\.(experts\.\d+|shared)\.", "mlp.", re.sub(r"^blocks\.\d+\.", "", prefix))
        # The output head is a linear map by form, but a table of vectors by role.
        stated = module.distributions(for_tables(init) if part == "head" else init)
        if missing := [name for name in own if name not in stated]:
            raise TypeError(f"{type(module).__name__} owns parameters {missing} but does not state their distributions")
        if wrong := [name for name in own if not isinstance(stated[name], Distribution)]:
            given = f"{stated[wrong[0]]!r} as the distribution of {wrong[0]}"
            raise TypeError(f"{type(module).__name__} states {given}; give one such as Constant(1.0)")
        if part in init.zero:
            stated["weight"] = Constant(0.0)
        full = {name: name_below(prefix, name) for name in own}
        plan |= {full[name]: stated[name] for name in own if full[name] in names}
    return plan
