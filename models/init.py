"""What parameters are drawn from: distributions, the initialisers that choose them, and the layers that own them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from .config import InitConfig


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


Distribution = Normal | Constant


@dataclass(frozen=True)
class Role:
    """What an initialiser may ask about a matrix."""

    fan_in: int
    fan_out: int
    residual_writers: int | None = None
    """How many maps write to the residual stream, for one of them; None for all other matrices."""


#: Initialisers by name: (config, role of the matrix) → distribution.
INITIALISERS: dict[str, Callable[[InitConfig, Role], Distribution]] = {
    "fan_in": lambda config, role: Normal(role.fan_in**-0.5),
    "normal": lambda config, role: Normal(config.std),
    "gpt2": lambda config, role: Normal(config.std * (role.residual_writers or 1) ** -0.5),
    "xavier": lambda config, role: Normal((2 / (role.fan_in + role.fan_out)) ** 0.5),
    "kaiming": lambda config, role: Normal((2 / role.fan_in) ** 0.5),
}


@runtime_checkable
class StatesBirth(Protocol):
    """A module that says what each parameter of its own is drawn from."""

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Distribution of each parameter owned directly, by its name inside the module."""


class Linear(nn.Linear):
    """A linear map ``[…, in_features] → […, out_features]``; its bias starts at 0.

    ``residual_writers`` marks a map that writes to the residual stream: see :class:`Role`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, residual_writers: int | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.role = Role(in_features, out_features, residual_writers)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`StatesBirth`."""
        return {"weight": INITIALISERS[init.kind](init, self.role), "bias": Constant(0.0)}


class Embedding(nn.Embedding):
    """A table of vectors. Its fan-in is its width: that is what it is when the table serves as the output head."""

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`StatesBirth`."""
        return {"weight": INITIALISERS[init.kind](init, Role(self.embedding_dim, self.num_embeddings))}


def birth_plan(model: nn.Module, init: InitConfig) -> dict[str, Distribution]:
    """Distribution of every parameter of ``model`` by full name; tied parameters appear once.

    Raises:
        TypeError: a module owns parameters but does not state their birth.
    """
    plan: dict[str, Distribution] = {}
    names = {name for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        if not isinstance(module, StatesBirth):
            raise TypeError(f"{type(module).__name__} owns parameters {own} but does not state their distributions")
        stated = module.distributions(init)
        if missing := [name for name in own if name not in stated]:
            raise TypeError(f"{type(module).__name__} owns parameters {missing} but does not state their distributions")
        full = {name: f"{prefix}.{name}" if prefix else name for name in own}
        plan |= {full[name]: stated[name] for name in own if full[name] in names}
    return plan
