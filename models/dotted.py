"""Fields of a nested config by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree of fields, in its order: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``; a list is one leaf.

    Args:
        tree: as ``dataclasses.asdict`` or a YAML file gives it.
        prefix: what every name begins with.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
