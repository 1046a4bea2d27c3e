"""The optimizer's groups: what decays, and what does not. Their order numbers the parameters in a checkpoint."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from ..errors import RunError
from ..models.parameter_roles import ParameterRole, parameter_roles
from ..models.tensor_shards import full_shape

#: Roles whose parameters decay towards zero.
DECAYED = {ParameterRole.MATRIX, ParameterRole.EMBEDDING}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: parameters that decay, then all others, each in the model's order."""
    roles, named = parameter_roles(model), list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if roles[name] in DECAYED], "weight_decay": weight_decay},
        {"params": [p for name, p in named if roles[name] not in DECAYED], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def renumber_optimizer_state(stored: dict[str, Any], model: nn.Module) -> None:
    """Bring an optimizer's state, in place, into the groups of this version.

    Earlier versions grouped by number of dimensions, so that the biases of keys and values and a T5 table decayed. What
    they wrote is taken over parameter by parameter.

    Raises:
        RunError: the groups are of another model.
    """
    ours = [group["params"] for group in parameter_groups(model, 0.0)]
    parameters = list(model.parameters())
    matrices = [p for p in parameters if len(full_shape(p)) >= 2]
    vectors = [p for p in parameters if len(full_shape(p)) < 2]
    by_dimensions = [group for group in (matrices, vectors) if group]
    sizes = [len(group["params"]) for group in stored["param_groups"]]
    if sizes == [len(group) for group in ours]:
        return
    if sizes != [len(group) for group in by_dimensions]:
        raise RunError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, this model's "
            f"{[len(group) for group in ours]}; the run's config.yaml is another model's"
        )
    number = {id(p): i for i, p in enumerate(chain.from_iterable(by_dimensions))}
    order = [number[id(p)] for p in chain.from_iterable(ours)]
    stored["state"] = {new: stored["state"][old] for new, old in enumerate(order) if old in stored["state"]}
    numbers = iter(range(len(order)))
    groups = stored["param_groups"]
    stored["param_groups"] = [
        {**groups[min(i, len(groups) - 1)], "params": [next(numbers) for _ in group]} for i, group in enumerate(ours)
    ]
