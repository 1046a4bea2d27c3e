"""What decides which text becomes which ids, in parts, so that the tokenizers of two checkpoints can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ..files import check_file, content_digest, file_sha256, read_json
from ..trainer.by_name.model_names import vocabulary

#: Files of tokenizers that are compared as they are.
_WHOLE_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class _Model(TypedDict):
    merges: NotRequired[list[Any] | None]


class _Tokenizer(TypedDict):
    """A ``tokenizers`` JSON, as far as it is read here."""

    model: _Model
    normalizer: NotRequired[Any]
    pre_tokenizer: NotRequired[Any]
    post_processor: NotRequired[Any]
    decoder: NotRequired[Any]


def tokenizer_parts(folder: Path) -> dict[str, str]:
    """Every part of a folder's tokenizer by name, large ones as digests; empty where there is none.

    Versions of the library write defaults out or leave them out, so that only parts that both have tell two apart.

    Raises:
        RunError: a file of it is damaged.
    """
    found = {}
    if (file := folder / "tokenizer.json").is_file():
        found["vocabulary"] = content_digest(vocabulary(file))
        content = read_json(file, _Tokenizer, "give the model's own tokenizer")
        if merges := content["model"].get("merges"):
            # Older versions write a merge as one text, newer ones as two.
            pairs = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]
            found["merges"] = content_digest(pairs)
        for name in _STEPS:
            if name in content:
                found |= dict(_leaves(name, content[name]))
    for name in _WHOLE_FILES:
        if (folder / name).is_file():
            check_file(folder / name)
            found[name] = file_sha256(folder / name)
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Dotted names and values; of a group that it is one, so that nothing in its place is another value."""
    if not isinstance(value, dict | list):
        yield name, json.dumps(value)
        return
    yield name, "a group" if isinstance(value, dict) else f"{len(value)} of them"
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{name}.{key}", inside)
