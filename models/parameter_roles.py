"""Roles of parameters, stated by the modules that own them. Optimizers choose by role, not by dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol, runtime_checkable

from torch import nn


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


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter of ``model`` by full name, in the order of ``named_parameters``.

    Raises:
        TypeError: a module owns parameters but does not state their roles.
    """
    roles: dict[str, ParameterRole] = {}
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        stated = module.parameter_roles if isinstance(module, StatesRoles) else {}
        if missing := [name for name in own if name not in stated]:
            raise TypeError(f"{type(module).__name__} owns parameters {missing} but does not state their roles")
        roles |= {f"{prefix}.{name}" if prefix else name: stated[name] for name in own}
    return {name: roles[name] for name, _ in model.named_parameters()}
