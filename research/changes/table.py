"""All changes by name, with those of single weights: fewer bits, noise, zeros; and how a file names one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_type_hints

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import UsageError
from ...measure.quantised.rounding import rounded
from ...models.init import keyed_generator
from ...schema import SchemaError, check, quoted
from .change import Change, ModelWeights, is_block_matrix, share_problem
from .coordinates import ChannelPermutation, ChannelScaling, Rotation, SignFlips, UnitPermutation
from .sizes import BlockCopying, BlockDropping, Merging, VocabularyExtension

# ---------------------------------------------------------------- weights in fewer bits

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Rounding(Change):
    """Weights rounded to nearest. They keep their dtype, with fewer distinct values."""

    to: Literal["bf16", "fp16", "int8", "int4"]
    """``bf16``, ``fp16``: all tensors. ``int8``, ``int4``: the linear maps of the blocks, on a symmetric grid for each
    output channel (definitions §14); embedding, head, gains and biases stay as they are."""

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        return model._replace(tensors={name: self._rounded(name, tensor) for name, tensor in model.tensors.items()})

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        if self.to in _FLOATS:
            return tensor.to(_FLOATS[self.to]).to(tensor.dtype) if tensor.is_floating_point() else tensor
        return rounded(tensor, _BITS[self.to], 1) if is_block_matrix(name, tensor) else tensor


# ---------------------------------------------------------------- random numbers added to weights


@dataclass(frozen=True)
class Noise(Change):
    """Independent normal numbers are added to every matrix and table."""

    share: float
    """Standard deviation of the noise, as a share of the matrix's standard deviation."""

    @override
    def problems(self) -> list[str]:
        return [] if 0 < self.share <= 100 else [f"share is {self.share}: give a number above 0, at most 100"]

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        return model._replace(
            tensors={
                name: self._disturbed(tensor, name, seed) if name.endswith(".weight") and tensor.ndim == 2 else tensor
                for name, tensor in model.tensors.items()
            }
        )

    def _disturbed(self, matrix: Tensor, name: str, seed: int) -> Tensor:
        normals = keyed_generator(seed, "noise", name).standard_normal(tuple(matrix.shape), dtype="float32")
        return matrix + self.share * matrix.std(correction=0) * torch.from_numpy(normals).to(matrix)


# ---------------------------------------------------------------- weights set to 0


@dataclass(frozen=True)
class Pruning(Change):
    """The smallest weights of every linear map of the blocks become 0 (magnitude pruning, arXiv 1506.02626)."""

    share: float
    """Share of a matrix's weights that become 0."""

    @override
    def problems(self) -> list[str]:
        return share_problem("share", self.share)

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        return model._replace(
            tensors={
                name: self._pruned(tensor) if is_block_matrix(name, tensor) else tensor
                for name, tensor in model.tensors.items()
            }
        )

    def _pruned(self, matrix: Tensor) -> Tensor:
        pruned = matrix.clone(memory_format=torch.contiguous_format)
        smallest = matrix.abs().reshape(-1).argsort(stable=True)[: round(self.share * matrix.numel())]
        pruned.view(-1)[smallest] = 0
        return pruned


# ---------------------------------------------------------------- the table of changes
# Table of all changes by name, and the reader of a change from a file.

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
        raise UsageError(f"kind is {quoted(name)}: {_hint(str(name), kinds)}")
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
