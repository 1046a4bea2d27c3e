"""Fields of a study file for its tests: options that all of them share, and a group of tests by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ..reading import Reader, where
from .comparison import PROBE_FIELDS, RECIPE_FIELDS, Comparison, read_comparison


def read_tests(
    reader: Reader, content: Mapping[str, Any], prefixes: Mapping[str, str], default: Mapping[str, Any]
) -> dict[str, Comparison]:
    """Read the tests of a study, by name, from its fields ``test`` and ``tests``.

    Args:
        reader: reader of the file.
        content: the study's fields.
        prefixes: places of fields that are not at the top of the file.
        default: default of ``tests``.

    Raises:
        UsageError: a field is invalid; the message names the file, the field and the value.
    """
    shared_at, tests_at = (where(prefixes, field) for field in ("test", "tests"))
    shared, tests = _options(reader, content.get("test", {}), shared_at), content.get("tests", dict(default))
    if not reader.named(tests, tests_at):
        raise reader.wrong(tests_at, tests, "name at least one")
    return {test: _comparison(reader, fields, shared, f"{tests_at}.{test}") for test, fields in tests.items()}


def _options(reader: Reader, value: Any, at: str) -> dict[str, Any]:
    """Read the fields of a probe and of a recipe."""
    # YAML reads an unquoted `null` as none, also where it is a field's name.
    options = {"null" if name is None else name: option for name, option in reader.group(value, at).items()}
    reader.known(options, (*PROBE_FIELDS, *RECIPE_FIELDS), f"{at}.")
    return options


def _comparison(reader: Reader, fields: Any, shared: dict[str, Any], at: str) -> Comparison:
    options = shared | _options(reader, fields, at)
    if options.get("null", ...) is None:
        del options["null"]
    try:
        return read_comparison(options)
    except UsageError as error:
        raise UsageError(f"{reader.file}: {at}: {error}") from None
