"""Fields of a nested config by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a tree of fields, in its order: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``; a list is one leaf.

    Args:
        tree: mapping from ``dataclasses.asdict`` or a YAML file.
        prefix: prefix of every name.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tree whose leaves have these dotted names, the inverse of `dotted`: ``{"a.b": 1}`` is ``{"a": {"b":
    1}}``.
    """
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        *groups, last = name.split(".")
        branch = tree
        for group in groups:
            below = branch.get(group)
            branch[group] = branch = below if isinstance(below, dict) else {}
        branch[last] = value
    return tree
