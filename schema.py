"""Types that declare the content of a file, and the strict check of the content before any use.

A schema is a type that pydantic reads: a ``TypedDict``, ``list[…]``, ``dict[str, …]``, ``Literal``, a union, a plain
type, or one of them ``Annotated`` with bounds. Whole numbers also count as ``float``, and ``bool`` is no number. Fields
that a schema does not have are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from annotated_types import Interval, Len

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: Range of a seed, whose decimal digits are hashed.
SEEDS = (-(1 << 63), (1 << 64) - 1)
#: A step, or another count that fits into 64 bits.
Count = Annotated[int, Interval(ge=0, le=2**62)]
#: SHA-256 in hexadecimal.
Sha256 = Annotated[str, Len(64, 64)]

#: What pydantic expected, by the type of its error, in words; braces hold facts about the error.
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text",
    "none_required": "null",
    "dict_type": "an object",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a text of at least {min_length}",
    "string_too_long": "a text of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


class SchemaError(Exception):
    """The content differs from its schema: ``field: its value, and the expected type``."""


def quoted(value: Any, limit: int = 60, none: str = "None") -> str:
    """Format ``value`` for a message: in one line, and short; ``none`` is the word for None where it was read."""
    if value is None:
        return none
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


def converted(value: Any, schema: Any, where: str = "") -> Any:
    """Compare ``value`` with ``schema`` and return it, with whole numbers in places of ``float`` as floats.

    Args:
        value: a value from JSON or YAML.
        schema: a type, as the module says.
        where: the field's name, dotted; "" for the whole.

    Raises:
        SchemaError: the value differs from the schema; the message names the field and the value.
    """
    from pydantic import ValidationError

    try:
        return _validator(schema).validate_python(value, strict=True)
    except ValidationError as error:
        raise SchemaError(_message(value, error.errors(include_url=False), where)) from None


def check(value: Any, schema: Any, where: str = "") -> None:
    """Compare ``value`` with ``schema``; see :func:`converted`."""
    converted(value, schema, where)


def checked(value: Any, schema: Any, where: str = "") -> Any:
    """Return ``value`` as it is after comparing it with ``schema``; see :func:`converted`."""
    converted(value, schema, where)
    return value


@cache
def _validator(schema: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _message(value: Any, errors: Sequence[Any], where: str) -> str:
    """Name the deepest field that is wrong, and all that it might have been: a union has an error for each part."""
    places = [_place(value, error) for error in errors]
    deepest = max(places, key=len)
    found = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    # Of a union's parts the one counts whose type the value has.
    found = [error for error in found if not error["type"].endswith("_type")] or found
    field, wrong = where, found[0]
    for step in deepest:
        field = f"{field}[{step}]" if isinstance(step, int) else f"{field}.{str(step)[:60]}".lstrip(".")
    if wrong["type"] == "missing":
        return f"{field} is missing"
    if wrong["loc"][-1:] == ("[key]",):
        return f"a name in {field or 'it'} is {quoted(wrong['input'])}, not text"
    given = wrong["input"]
    said = f"has the length {len(given)}" if wrong["type"].endswith(("short", "long")) else f"is {quoted(given)}"
    # A sentence of pydantic is whole as it is, whatever braces a value brought into it.
    expected = [_EXPECTED.get(one["type"], "{msg}").format(msg=one["msg"], **one.get("ctx", {})) for one in found]
    return f"{field or 'the whole'} {said}, not {' or '.join(dict.fromkeys(expected))}"


def _place(value: Any, error: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the steps that lead into ``value``: pydantic puts names of a union's parts between them."""
    found = list[Any]()
    steps = error["loc"]
    for step in steps[:-2] if steps[-1:] == ("[key]",) else steps:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            found.append(step)
            value = value[step]
    return (*found, steps[-1]) if error["type"] == "missing" else tuple(found)


def outside(group: str, config: object, bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """List a line for each field of a config that is out of its bounds, with the remedy; None is within all bounds.

    Args:
        group: prefix of the fields' names, such as ``trainer``; "" for none.
        config: the config with the fields.
        bounds: field → (least, most); nobody can want a value outside, so none is tried.
    """
    found = []
    for name, (least, most) in bounds.items():
        value, field = getattr(config, name), f"{group}.{name}".lstrip(".")
        if value is not None and not value >= least:
            found.append(f"{field} is {quoted(value)}: give at least {least}")
        elif value is not None and not value <= most:
            found.append(f"{field} is {quoted(value)}: give at most {most}")
    return found


def mistyped(config: object) -> list[str]:
    """List a line for each field of a dataclass whose value does not have the field's declared type; see
    :func:`check`.
    """
    found = []
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        try:
            check(getattr(config, name), kind, name)
        except SchemaError as error:
            found.append(str(error))
    return found
