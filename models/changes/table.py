"""Table of all changes by name, and the reader of a change from a file."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from ...errors import UsageError
from ...schema import SchemaError, check, shown
from .change import Change
from .channels import ChannelPermutation, ChannelScaling, Rotation, SignFlips
from .depth import BlockCopying, BlockDropping
from .low_bits import Rounding
from .merging import Merging
from .noise import Noise
from .pruning import Pruning
from .unit_order import UnitPermutation
from .vocabulary import VocabularyExtension

Kind = TypeVar("Kind")

#: Changes by the ``kind`` that a file names.
CHANGES: dict[str, type[Change]] = {
    "round": Rounding,
    "prune": Pruning,
    "noise": Noise,
    "merge": Merging,
    "extend_vocabulary": VocabularyExtension,
    "drop_blocks": BlockDropping,
    "copy_blocks": BlockCopying,
    "permute_units": UnitPermutation,
    "permute_channels": ChannelPermutation,
    "flip_signs": SignFlips,
    "scale_channels": ChannelScaling,
    "rotate": Rotation,
}

#: Changes that leave every logit unchanged, if the architecture allows them.
FUNCTION_PRESERVING = ("permute_units", "permute_channels", "flip_signs", "scale_channels", "rotate")


def read_change(fields: Mapping[str, Any]) -> Change:
    """Build the change that a file gives as ``kind`` and its settings, such as ``{kind: prune, share: 0.5}``.

    Raises:
        UsageError: no such kind, a field that it does not have, one that is missing or of another type or range.
    """
    return read_kind(fields, CHANGES)


def read_kind(fields: Mapping[str, Any], kinds: Mapping[str, type[Kind]]) -> Kind:
    """Build the row of a table of dataclasses that ``kind`` names from the other fields; see :func:`read_change`."""
    settings = dict(fields)
    name = settings.pop("kind", None)
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"kind is {shown(name)}: {_hint(str(name), kinds)}")
    kind = kinds[name]
    hints = get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for field, value in settings.items():
        if field not in known:
            raise UsageError(f"{field}: {name} has no such field; {_hint(str(field), known)}")
        try:
            check(value, hints[field], field)
        except SchemaError as error:
            raise UsageError(str(error)) from None
    for field, declared in known.items():
        nothing = declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING
        if field not in settings and nothing:
            raise UsageError(f"{field} is missing: {name} needs it")
    return kind(**settings)


def _hint(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known) or 'none'}"
