"""``state.json`` of a checkpoint (format 2): everything except tensors, and the places of the tensors.

For every tensor it has shape, type, and the file of each range of its elements. A checkpoint does not depend on the
distribution over processes of the run that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NotRequired

import numpy as np
from torch import Tensor
from typing_extensions import TypedDict

from ...files import content_digest
from ...models.tensor_shards import Runs, TensorShard, shard_of
from ...schema import Count, SchemaError, Sha256, check, quoted

FORMAT = 2
#: Entry of the checkpoint of a run that trains an adapter: the digest of the model that it is attached to.
BASE = "base_digest"
#: Entry with the averaged weights of a run that keeps them, by the model's names.
AVERAGE = "average"
TENSORS, STATE = "tensors.safetensors", "state.json"
MEND = "delete the folder to go on from the checkpoint before it"

_PLAIN = (bool, int, float, str, type(None))


def part_name(rank: int, world_size: int) -> str:
    """Return the file name of the tensors that ``rank`` writes, without suffix; a single process writes whole
    tensors.
    """
    return "tensors" if world_size == 1 else f"tensors-{rank:05d}"


class Piece(TypedDict):
    """Elements of a flattened tensor that one file holds: a range, unless the last two say otherwise."""

    file: str
    start: Count
    n: Count
    run: NotRequired[Count]
    """Elements of each of several runs."""
    stride: NotRequired[Count]
    """Distance between the beginnings of two runs."""


class TensorFacts(TypedDict):
    """Facts about a tensor of a checkpoint."""

    shape: list[Count]
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    pieces: list[Piece]


class State(TypedDict):
    """Content of ``state.json``, format 2."""

    format: Literal[2]
    step: Count
    sha256: Sha256
    files: dict[str, Sha256]
    tensors: dict[str, TensorFacts]
    state: Any


class State1(TypedDict):
    """Content of ``state.json``, format 1: one file of tensors, which has their shapes."""

    format: Literal[1]
    step: NotRequired[Count]
    sha256: Sha256
    state: Any


#: Format → schema.
STATES: Mapping[int, Any] = {1: State1, FORMAT: State}


# ── trees ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_json(value: Any, path: str, found: dict[str, TensorShard]) -> Any:
    """Convert ``value`` to JSON; this rank's shards of its tensors go into ``found`` under their path.

    Raises:
        TypeError: something is neither a tensor nor plain data; its path is named.
    """
    if isinstance(value, Tensor):
        value = shard_of(value if value.is_contiguous() else value.contiguous())
    if isinstance(value, TensorShard):
        found[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        if strange := next((k for k in value if not isinstance(k, _PLAIN)), None):
            raise TypeError(f"checkpoint entry {path!r} has the key {strange!r}, which is no plain data")
        # As pairs, because keys may be numbers; with a tag, because a dictionary may look like a tag.
        return {"dict": [[k, to_json(v, f"{path}/{k}" if path else str(k), found)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [to_json(v, f"{path}/{i}", found) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"checkpoint entry {path!r} is a {type(value).__name__}, which is neither a tensor nor plain data")


def from_json(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Convert JSON from :func:`to_json` back; ``tensor`` maps a path to the value for its tensor.

    Raises:
        SchemaError: the JSON is not of that form.
    """
    if isinstance(value, _PLAIN):
        return value
    tag, content = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", value)
    builders: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "tensor": (str, tensor),
        "dict": (list[list[Any]], lambda pairs: {_key(pair): from_json(pair[1], tensor) for pair in pairs}),
        "list": (list[Any], lambda items: [from_json(v, tensor) for v in items]),
        "tuple": (list[Any], lambda items: tuple(from_json(v, tensor) for v in items)),
        "float": (Literal["nan", "inf", "-inf"], float),
    }
    if tag not in builders:
        raise SchemaError(f"state has {quoted(value)}, not one of {', '.join(builders)}")
    schema, build = builders[tag]
    check(content, schema, f"{tag} in state")
    return build(content)


def _key(pair: list[Any]) -> Any:
    if len(pair) != 2 or not isinstance(pair[0], _PLAIN):
        raise SchemaError(f"state has {quoted(pair)}, not a name and a value")
    return pair[0]


# ── state.json ──────────────────────────────────────────────────────────────────────────────────────────────────────


def state_content(step: int, files: Mapping[str, str], tensors: Mapping[str, Any], tree: Any) -> dict[str, Any]:
    """Return the content of ``state.json``: the saved state, the other files' checksums, and its own checksum."""
    content = {"format": FORMAT, "step": step, "files": dict(files), "tensors": dict(tensors), "state": tree}
    return {"format": FORMAT, "step": step, "sha256": content_digest(content)} | content


def runs_of(piece: Mapping[str, Any]) -> Runs:
    """Return the places of a piece's elements."""
    plain = Runs.of_range(piece["start"], piece["n"])
    return plain._replace(run=piece.get("run", plain.run), stride=piece.get("stride", plain.stride))


def piece_of(runs: Runs) -> dict[str, int]:
    """Return the entry of a piece, but for its file."""
    facts = runs._asdict()
    return {name: facts[name] for name in ("start", "n")} if runs.is_range else facts


def make_up(found: Iterable[Runs], start: int, stop: int) -> bool:
    """Return True if runs hold every element of a range once, and nothing else."""
    found = [*found]
    # The beginning and length of every run: a matrix that is sharded along its columns has one in each row.
    starts = np.concatenate([[start], *(runs.start + runs.stride * np.arange(runs.n // runs.run) for runs in found)])
    lengths = np.concatenate([[0], *(np.full(runs.n // runs.run, runs.run) for runs in found)])
    order = np.lexsort((lengths, starts))
    ends = start + lengths[order].cumsum()
    return bool(ends[-1] == stop and (starts[order][1:] == ends[:-1]).all())


def _check_whole(name: str, shape: list[int], pieces: list[dict[str, Any]]) -> None:
    if not make_up(map(runs_of, pieces), 0, math.prod(shape)):
        raise RuntimeError(f"checkpoint entry {name!r}: its pieces do not make up {shape}: {pieces}")


def shape_and_dtype(piece: TensorShard) -> dict[str, Any]:
    """Return shape and type of a tensor."""
    return {"shape": list(piece.shape), "dtype": str(piece.local.dtype).removeprefix("torch.")}


def tensor_index(known: Mapping[str, Mapping[str, Any]], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for every tensor, its shape, its type, and the file of each range of elements.

    Args:
        known: :func:`shape_and_dtype` of every tensor.
        parts: each rank's note about the file that it wrote.

    Raises:
        RuntimeError: a tensor is not written exactly once and whole.
    """
    pieces: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    for part in parts:
        for name, piece in part["pieces"].items():
            pieces[name].append({"file": part["file"], **piece})
    for name, its in known.items():
        _check_whole(name, its["shape"], pieces[name])
    return {name: {**its, "pieces": pieces[name]} for name, its in known.items()}
