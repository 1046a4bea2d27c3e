"""Parameter groups of the optimizer: with and without weight decay. Their order numbers the parameters in a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn

from ...errors import RunError, UsageError
from ...models.init import ParameterRole, parameter_roles
from ...models.tensor_shards import full_shape
from .table import OPTIMIZERS, OptimizerConfig

#: Roles whose parameters decay towards zero.
DECAYED = {ParameterRole.MATRIX, ParameterRole.EMBEDDING, ParameterRole.HEAD, ParameterRole.DECAYED_GAIN}


def parameter_groups(model: nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: parameters that decay, then all others, each in the model's order, without
    frozen ones.

    If one optimizer steps matrices and AdamW the rest, the matrices come first, in a separate group.

    Raises:
        UsageError: the optimizer steps matrices, but the model has none, or one of another number of axes.
    """
    roles = parameter_roles(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = ParameterRole.MATRIX if optimizer.steps_matrices else None
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if roles[name] in DECAYED - {matrices}]},
        {"params": [p for name, p in named if roles[name] not in DECAYED]},
    ]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = optimizer.weight_decay_of_rest, 0.0
    if matrices is not None:
        apart = {name: p for name, p in named if roles[name] == matrices}
        _check_matrices(apart, optimizer)
        groups.insert(0, {"params": list(apart.values()), "weight_decay": optimizer.weight_decay})
    return [group for group in groups if group["params"]]


def _check_matrices(parameters: Mapping[str, nn.Parameter], optimizer: OptimizerConfig) -> None:
    row = next(name for name, kind in OPTIMIZERS.items() if kind is type(optimizer))
    if not parameters:
        raise UsageError(f"optim.name is {row}, which steps matrices, but the model has none: give adamw")
    for name, parameter in parameters.items():
        if len(shape := full_shape(parameter)) != 2:
            raise UsageError(
                f"optim.name is {row}, which steps matrices, but {name} has the role of one and the shape "
                f"{list(shape)}: state another role for it (models/init.py), or give adamw"
            )


def renumber_optimizer_state(stored: dict[str, Any], model: nn.Module, optimizer: OptimizerConfig) -> None:
    """Bring an optimizer's state, in place, into the groups of this version.

    Earlier versions grouped by number of dimensions, so that the biases of keys and values and a T5 table decayed.
    Their states are converted parameter by parameter.

    Raises:
        RunError: the groups belong to another model.
    """
    groups_now = [group["params"] for group in parameter_groups(model, optimizer)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if len(full_shape(p)) >= 2]
    vectors = [p for p in parameters if len(full_shape(p)) < 2]
    by_dimensions = [group for group in (matrices, vectors) if group]
    sizes = [len(group["params"]) for group in stored["param_groups"]]
    if sizes == [len(group) for group in groups_now]:
        return
    if sizes != [len(group) for group in by_dimensions]:
        raise RunError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, this model's "
            f"{[len(group) for group in groups_now]}; the run's config.yaml is another model's"
        )
    number = {id(p): i for i, p in enumerate(chain.from_iterable(by_dimensions))}
    order = [number[id(p)] for p in chain.from_iterable(groups_now)]
    stored["state"] = {new: stored["state"][old] for new, old in enumerate(order) if old in stored["state"]}
    numbers = iter(range(len(order)))
    groups = stored["param_groups"]
    stored["param_groups"] = [
        {**groups[min(i, len(groups) - 1)], "params": [next(numbers) for _ in group]}
        for i, group in enumerate(groups_now)
    ]
