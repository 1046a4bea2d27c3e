"""One file of the example damaged in one of the ways that its kind has, with its checksums or without."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import damage
from case import Must

#: Files that have a checksum, of their own or in another file.
_CHECKED = ("config.yaml", "birth.json", "summary.json", "arrays.safetensors", "state.json", "tensors.safetensors")
_CHECKED += ("meta.json", "train-00000.bin", "val-00000.bin")


def _own_checksum(file: Path) -> None:
    """Make the checksums of a changed file say that nothing was changed."""
    if file.name == "tensors.safetensors":
        state = json.loads((file.parent / "state.json").read_text())
        state["files"][file.name] = damage.sha256_of(file.read_bytes())
        _write_sealed(file.parent / "state.json", state, "sha256")
    elif file.name == "arrays.safetensors":
        summary = json.loads((file.parent / "summary.json").read_text())
        if "files" in summary:
            summary["files"][file.name] = damage.sha256_of(file.read_bytes())
            _write_sealed(file.parent / "summary.json", summary, "sha256")


def _write_sealed(file: Path, content: Any, key: str) -> None:
    if isinstance(content, dict) and key in content:
        rest = {name: value for name, value in content.items() if name != key}
        if file.name == "meta.json":
            rest = {"meta": rest}
        with contextlib.suppress(RecursionError):
            content[key] = damage.sha256_of(json.dumps(rest, sort_keys=True).encode())
    file.write_text(damage.json_text(content), encoding="utf-8")


_SEAL = {"state.json": "sha256", "summary.json": "sha256", "birth.json": "sha256", "meta.json": "checksum"}


def damage_file(file: Path, rng: random.Random, others: list[Path]) -> tuple[str, Must]:
    """Damage one file of the example in one of the ways that its kind has."""
    checked: Must = "same" if file.name in _CHECKED else "any"
    what = rng.random()
    if what < 0.25:
        way = rng.choice(damage.PLACE)
        way(file, rng)
        # A run that was killed early has no log yet.
        log_is_gone = file.suffix == ".jsonl" and way in (damage.missing, damage.empty)
        return way.__name__, checked if way is damage.empty or log_is_gone else "same"
    if file.suffix == ".safetensors" and what < 0.7:
        way = rng.choice(damage.TENSORS)
        way(file, rng)
        sealed = rng.random() < 0.7
        if sealed:
            _own_checksum(file)
        must = "same" if way in damage.NEVER_VALID else checked if not sealed else "any"
        return f"{way.__name__}{' with its checksum' if sealed else ''}", must
    if file.suffix == ".json" and what < 0.75:
        whole = json.loads(file.read_text())
        content, seen = damage.change_json(whole, rng)
        sealed = rng.random() < 0.7
        seen &= file.name != "summary.json" or not _may_be_a_summary(whole, content)
        if sealed:
            _write_sealed(file, content, _SEAL.get(file.name, ""))
        else:
            file.write_text(damage.json_text(content), encoding="utf-8")
        must: Must = "same" if seen or (not sealed and checked == "same") else "any"
        return f"change_json{' with its checksum' if sealed else ''}", must
    if file.suffix == ".jsonl" and what < 0.75:
        lines = file.read_text().splitlines()
        at = rng.randrange(len(lines))
        content, seen = damage.change_json(json.loads(lines[at]), rng)
        lines[at] = damage.json_text(content)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"change_json of line {at + 1}", "any"
    if others and what > 0.9:
        damage.swap(file, other := rng.choice(others))
        return f"swap with {other.name}", checked
    way = rng.choice(damage.BYTES)
    way(file, rng)
    return way.__name__, checked


def _may_be_a_summary(whole: Mapping[str, Any], content: Any) -> bool:
    """Whether a changed summary is as good as the whole: it only shows the model's config, which may be anybody's;
    a scalar that is not finite is null, and so are tokens that nobody counted."""
    if not isinstance(content, dict):
        return False
    # As JSON: Python takes false for 0.
    changed = [
        name
        for name in {**whole, **content}
        if damage.json_text(whole.get(name)) != damage.json_text(content.get(name))
    ]
    if changed == ["model"] or (changed == ["tokens"] and content.get("tokens") is None):
        return True
    nulls = [name for name in changed if name == "bias" or name.startswith("bias_")]
    return (
        bool(changed)
        and changed == nulls
        and all(
            isinstance(group := content.get(name), dict)
            and group.keys() == whole[name].keys()
            and all(value is None or value == whole[name][key] for key, value in group.items())
            for name in nulls
        )
    )
