"""Conversion of a model's config to a tree of fields, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ....errors import UsageError
from ...config import ModelConfig


def config_of_fields(kind: Any, given: Mapping[str, Any], where: str = "") -> Any:
    """Build a config from its fields, with nested configs as mappings.

    Args:
        kind: the dataclass, as :class:`ModelConfig`.
        given: fields of the config; those left out have their defaults.
        where: prefix of a field's name in messages.

    Raises:
        UsageError: an unknown field, or an impossible value.
    """
    known = {field.name: field for field in fields(kind)}
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"{where}{unknown[0]}: there is no such field in this version; leave it out")
    nested = {
        name: config_of_fields(known[name].default_factory, value, f"{where}{name}.")
        for name, value in given.items()
        if isinstance(value, Mapping)
    }
    return kind(**{**given, **nested})


def resolved_fields(config: ModelConfig) -> dict[str, Any]:
    """Return all fields as a tree, with derived sizes filled in: tools read sizes from ``config.json``."""
    return asdict(replace(config, n_kv_heads=config.kv_heads, head_dim=config.d_head, d_ff=config.ff))
