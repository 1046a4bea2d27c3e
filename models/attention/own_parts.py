"""Parts of attention by name: entries of a table, or a user's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from ...errors import UsageError
from ..config import ModelConfig
from ..init import birth_plan
from ..own_code import import_own, in_words, is_own
from ..parameter_roles import parameter_roles

PartT = TypeVar("PartT", bound=nn.Module)


def build_part(part: str, name: str, table: Mapping[str, type[PartT]], base: type[PartT], config: ModelConfig) -> PartT:
    """Build the part of one block that ``model.attention.PART`` names.

    Args:
        part: the field, such as ``normaliser``.
        name: a key of ``table``, or ``module:Class``.
        table: built-in parts by name.
        base: base of a user's class; such a class is made with the config alone.
        config: the model.

    Raises:
        UsageError: a user's class cannot be imported or made, does not derive from ``base``, or does not declare the
            distributions and roles of its parameters.
    """
    if not is_own(name):
        return table[name](config)
    field = f"model.attention.{part}"
    found = import_own(name, field)
    if not isinstance(found, type) or not issubclass(found, base):
        raise UsageError(f"{field} {name}: derive it from {base.__module__}.{base.__name__}")
    try:
        made = found(config)
        # Asked here, where the class can be named; a birth and an optimizer ask the same.
        birth_plan(made, config.init)
        parameter_roles(made)
    except Exception as error:  # a user's class may raise anything
        raise UsageError(f"{field} {name}: cannot be made ({in_words(error)})") from error
    return made
