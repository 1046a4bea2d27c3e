"""The fields of a model's config as a tree, there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ....errors import UsageError
from ...config import ModelConfig


def config_of_fields(kind: Any, given: Mapping[str, Any], where: str = "") -> Any:
    """A config from its fields, those of nested configs in mappings of their own.

    Args:
        kind: the dataclass, as :class:`ModelConfig`.
        given: its fields; those left out have their defaults.
        where: what messages write before a field's name.

    Raises:
        UsageError: a field that there is none of, or an impossible value.
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
    """All fields as a tree, with those that follow from others given too: tools read sizes from ``config.json``."""
    return asdict(replace(config, n_kv_heads=config.kv_heads, head_dim=config.d_head, d_ff=config.ff))
