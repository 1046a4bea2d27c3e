"""Types that declare the content of a file, and the check of the content before any use.

A schema is a type: a ``TypedDict``, ``list[…]``, ``dict[str, …]``, ``Literal``, a union, a plain type, or one of them
``Annotated`` with `Bounds`. Whole numbers also count as ``float``, and ``bool`` is no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


@dataclass(frozen=True)
class Bounds:
    """The least and the largest that a number, or the length of a text or a list, may be."""

    least: float
    most: float


#: Range of a seed, whose decimal digits are hashed.
SEEDS = (-(1 << 63), (1 << 64) - 1)
#: A step, or another count that fits into 64 bits.
Count = Annotated[int, Bounds(0, 2**62)]
#: SHA-256 in hexadecimal.
Sha256 = Annotated[str, Bounds(64, 64)]

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    dict: "an object",
    list: "a list",
}


class SchemaError(Exception):
    """The content differs from its schema: ``field: its value, and the expected type``."""


def quoted(value: Any, limit: int = 60) -> str:
    """Format ``value`` for a message: in one line, and short."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of very many digits"
    # Only the shown part of a large value is formatted.
    text = repr(value[:limit] if isinstance(value, (str, bytes)) else value) if not _is_large(value) else ""
    if isinstance(value, (dict, list)) and (not text or len(text) > limit):
        return "an object" if isinstance(value, dict) else "a list"
    # A terminal cannot show text that UTF-8 cannot encode.
    text = text.encode("utf-8", errors="backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_large(value: Any) -> bool:
    return isinstance(value, (dict, list)) and len(value) > 9


def check(value: Any, schema: Any, where: str = "") -> None:
    """Compare ``value`` with ``schema``.

    Args:
        value: a value from JSON or YAML.
        schema: a type, as the module says.
        where: the field's name, dotted; "" for the whole.

    Raises:
        SchemaError: the value differs from the schema; the message names the field and the value.
    """
    origin, arguments = get_origin(schema), get_args(schema)
    if schema is Any:
        return
    if origin is Annotated:
        check(value, arguments[0], where)
        for bounds in arguments[1:]:
            _check_bounds(value, bounds, where)
    elif origin is NotRequired:
        check(value, arguments[0], where)
    elif origin in (Union, UnionType):
        _check_union(value, arguments, where)
    elif origin is Literal:
        if not any(value == one and type(value) is type(one) for one in arguments):
            raise _wrong(value, f"one of {', '.join(map(str, arguments))}", where)
    elif is_typeddict(schema):
        _check_fields(value, schema, where)
    elif origin is dict:
        _check_kind(value, dict, where)
        for name, item in value.items():
            check(name, arguments[0], f"a name in {where or 'it'}")
            check(item, arguments[1], _below(where, name))
    elif origin is list:
        _check_kind(value, list, where)
        for i, item in enumerate(value):
            check(item, arguments[0], f"{where}[{i}]")
    else:
        _check_kind(value, schema, where)


def checked(value: Any, schema: Any, where: str = "") -> Any:
    """Return ``value`` after checking it against ``schema``; see :func:`check`."""
    check(value, schema, where)
    return value


def outside(group: str, config: object, bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """List a line for each field of a config that is out of its bounds, with the remedy; None is within all bounds.

    Args:
        group: prefix of the fields' names, such as ``trainer``; "" for none.
        config: the config with the fields.
        bounds: field → (least, most); nobody can want a value outside, so none is tried.
    """
    found = []
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            found.append(f"{_below(group, name)} is {quoted(value)}: give at least {least}")
        elif value is not None and not value <= most:
            found.append(f"{_below(group, name)} is {quoted(value)}: give at most {most}")
    return found


def mistyped(config: object) -> list[str]:
    """List a line for each field of a dataclass whose value does not have the field's declared type; see
    :func:`check`.
    """
    found = []
    schema: Any = type(config)
    for name, kind in _hints(schema).items():
        try:
            check(getattr(config, name), kind, name)
        except SchemaError as error:
            found.append(str(error))
    return found


def _below(where: str, name: Any) -> str:
    return f"{where}.{str(name)[:60]}".lstrip(".")


def _wrong(value: Any, wanted: str, where: str) -> SchemaError:
    return SchemaError(f"{where or 'the whole'} is {quoted(value)}, not {wanted}")


def _check_kind(value: Any, kind: Any, where: str) -> None:
    fits = type(value) is kind or (kind is float and type(value) is int and abs(value) < 2**1000)
    if not fits:
        raise _wrong(value, _WORDS[kind], where)


def _check_bounds(value: Any, bounds: Bounds, where: str) -> None:
    size, what = (len(value), "has the length ") if isinstance(value, (str, list, dict)) else (value, "is ")
    if not bounds.least <= size <= bounds.most:
        wanted = f"{bounds.least:g}" if bounds.least == bounds.most else f"{bounds.least:g} to {bounds.most:g}"
        raise SchemaError(f"{where or 'the whole'} {what}{quoted(size)}, not {wanted}")


def _check_union(value: Any, kinds: Sequence[Any], where: str) -> None:
    words = []
    for kind in kinds:
        try:
            return check(value, kind, where)
        except SchemaError as found:
            if type(value) is (get_origin(kind) or (dict if is_typeddict(kind) else kind)):
                raise  # of this kind, and wrong within
            words.append(str(found).rpartition(", not ")[2])
    raise _wrong(value, " or ".join(words), where)


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _check_fields(value: Any, schema: Any, where: str) -> None:
    _check_kind(value, dict, where)
    for name, kind in _hints(schema).items():
        if name in value:
            check(value[name], kind, _below(where, name))
        elif get_origin(kind) is not NotRequired:
            raise SchemaError(f"{_below(where, name)} is missing")
