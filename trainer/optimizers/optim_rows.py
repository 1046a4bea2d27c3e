"""Rows of the tables that fields of ``optim`` choose from: dataclasses of the other fields that each row reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

RowT = TypeVar("RowT")
NameT = TypeVar("NameT", bound=str)


def fields_of(kind: type[Any]) -> set[str]:
    """Return the fields of ``optim`` that a row reads besides those that all rows read."""
    return {field.name for field in dataclasses.fields(kind)}


def read_row(table: Mapping[NameT, type[RowT]], name: NameT, values: Mapping[str, Any]) -> RowT:
    """Build the row of this name from the values of ``optim``'s fields that it reads."""
    kind = table[name]
    return kind(**{field: values[field] for field in fields_of(kind)})


def unread_names(table: Mapping[Any, type[Any]], name: str) -> set[str]:
    """Return the fields of ``optim`` that other rows of ``table`` read, and this one does not."""
    return set().union(*map(fields_of, table.values())) - fields_of(table[name])


def unread_fields(
    what: str, table: Mapping[Any, type[Any]], name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Write a line for every value of ``optim`` that was set although the chosen row does not read it.

    Args:
        what: kind of the rows, as in ``optimizer``.
        table: the rows by name.
        name: name of the chosen row.
        values: values of ``optim``'s fields.
        defaults: defaults of the same fields.
    """
    return [
        f"optim.{field} is {values[field]}, which {what} {name} does not read: remove it (default: {defaults[field]})"
        for field in sorted(unread_names(table, name))
        if values[field] != defaults[field]
    ]
