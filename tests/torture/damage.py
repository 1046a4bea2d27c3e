"""Ways to damage a file: its bytes, its JSON, its tensors, or what stands in its place."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Values of every kind that no field should take without a look, and some that few take.
HOSTILE: tuple[Any, ...] = (None, True, -1, 0, 10**18, -(10**18), 2**63, 10**400, 1.5, -0.0, 1e308)
HOSTILE += (float("nan"), float("inf"), "", "text", "3", "١٢", "1e3", "a\0b", "../../outside", "/dev/zero")
HOSTILE += ("~nobody-of-this-name/x", "[/b]x", "\ud800", "x" * 5000, [], [1, "two", None], {}, {"a": {"b": 1}})


def deep(n: int) -> Any:
    """A list in a list, ``n`` times."""
    value: Any = 1
    for _ in range(n):
        value = [value]
    return value


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def flip_bit(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content) or 1)])


def insert(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    at = rng.randrange(len(content) + 1)
    what = rng.choice([b"\0", b"\xff\xfe", "١".encode(), b"[" * 3000, b"{", b'"', b"\n", b"9" * 6000, b"\xed\xa0\x80"])
    file.write_bytes(content[:at] + what + content[at:])


def repeat(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


def garbage(file: Path, rng: random.Random) -> None:
    file.write_bytes(
        rng.choice([b"null", b"[]", b"{}", b"1", b'"x"', b"[" * 100_000, b'{"a":' * 50_000, rng.randbytes(300), b"\n"])
    )


# ── what stands in its place ─────────────────────────────────────────────────────────────────────────────────────────


def empty(file: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def missing(file: Path, rng: random.Random) -> None:
    file.unlink()


def folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def link_loop(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


def device(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def sparse_giant(file: Path, rng: random.Random) -> None:
    """Nothing, which takes no room on the disk: less than a text may have, most of a gigabyte, or 16 of them."""
    with file.open("r+b") as f:
        f.truncate(rng.choice([1 << 27, 3 << 28, 1 << 34]))


def pickled(file: Path, rng: random.Random) -> None:
    """A pickle that leaves a file where the watch sees it, were it loaded in the folder of a case."""
    file.write_bytes(b"cposix\nsystem\n(S'touch ../watched/pickle'\ntR.")


BYTES = (flip_bit, truncate, insert, repeat, garbage)
PLACE = (empty, missing, folder, fifo, link_loop, device, sparse_giant, pickled)


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _branches(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, value in items for p in ((*path, key), *_branches(value, (*path, key)))]


def _is_like(old: Any, new: Any) -> bool:
    """Whether no schema can distinguish the two: of one type and kind."""
    number = isinstance(old, (int, float)) and isinstance(new, (int, float))
    if number and not isinstance(old, bool) and not isinstance(new, bool):
        return True
    return old is None or type(old) is type(new)


def change_json(content: Any, rng: random.Random) -> tuple[Any, bool]:
    """``content`` with one entry replaced, removed or renamed, and whether a schema can see it."""
    content = copy.deepcopy(content)
    paths = _branches(content)
    if not paths:
        return rng.choice(HOSTILE), True
    *above, last = rng.choice(paths)
    branch = content
    for key in above:
        branch = branch[key]
    what = rng.random()
    if what < 0.7:
        new = deep(rng.choice([60, 5000])) if rng.random() < 0.05 else rng.choice(HOSTILE)
        seen = not _is_like(branch[last], new)
        branch[last] = new
        return content, seen
    if what < 0.85 or isinstance(branch, list):
        del branch[last]
    else:
        branch[f"{last}x"] = branch.pop(last)
    return content, False


def json_text(content: Any) -> str:
    """JSON of nearly anything, as some writers make it: NaN and huge numbers as they are."""
    depth = 0
    while isinstance(content, list) and len(content) == 1:
        content, depth = content[0], depth + 1
    try:
        text = json.dumps(content)
    except RecursionError:
        text = "[" * 5000 + "]" * 5000
    return "[" * depth + text + "]" * depth


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sha256_of(content: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_safetensors(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data."""
    content = file.read_bytes()
    n = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def write_safetensors(file: Path, header: Any, data: bytes) -> None:
    """The same from its parts, however wrong they are."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def header_bomb(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", rng.choice([2**63, 2**40, 10**8 + 1, len(content), 0])) + content[8:])


def other_dtype(file: Path, rng: random.Random) -> None:
    """The same bytes under another type, its shape made to fit."""
    header, data = read_safetensors(file)
    name = rng.choice(_names(header))
    facts, size = header[name], {"F32": 4, "F64": 8, "I8": 1, "I64": 8, "F16": 2, "BF16": 2, "U8": 1, "I32": 4}
    new = rng.choice([dtype for dtype in size if dtype != facts["dtype"]])
    if facts["shape"] and rng.random() < 0.5:
        wide = [*facts["shape"]]
        wide[-1] = wide[-1] * size.get(facts["dtype"], 4) // size[new]
        facts["shape"] = wide
    else:
        # The shape stays, the bytes change with the type.
        data, header = _resized(header, data, name, bytes(math.prod(facts["shape"]) * size[new]))
        facts = header[name]
    facts["dtype"] = new
    write_safetensors(file, header, data)


def _resized(header: dict[str, Any], data: bytes, name: str, content: bytes) -> tuple[bytes, dict[str, Any]]:
    out, new = b"", dict(header)
    for key in sorted(_names(header), key=lambda name: header[name]["data_offsets"]):
        first, last = header[key]["data_offsets"]
        part = content if key == name else data[first:last]
        new[key] = header[key] | {"data_offsets": [len(out), len(out) + len(part)]}
        out += part
    return out, new


def other_shape(file: Path, rng: random.Random) -> None:
    header, data = read_safetensors(file)
    facts = header[rng.choice(_names(header))]
    n = math.prod(facts["shape"])
    facts["shape"] = rng.choice([[n, 1, 1], [1, 1, 1, n], [n + 1], [2**62, 4], [-1, n], [*facts["shape"][::-1], 1]])
    write_safetensors(file, header, data)


def other_names(file: Path, rng: random.Random) -> None:
    header, data = read_safetensors(file)
    name = rng.choice(_names(header))
    facts = header.pop(name)
    if rng.random() < 0.5:
        header[rng.choice(["../x", "", "unknown", "\ud800", "x" * 70_000, "a\0b"])] = facts
        write_safetensors(file, header, data)
    else:
        header[name] = facts
        data, header = _resized(header, data, name, b"")
        del header[name]
        write_safetensors(file, header, data)


def overlapping(file: Path, rng: random.Random) -> None:
    header, data = read_safetensors(file)
    facts = header[rng.choice(_names(header))]
    facts["data_offsets"] = rng.choice([[0, 4], [4, 0], [0, 2**60], [-4, 4], [len(data), len(data) + 4]])
    write_safetensors(file, header, data)


#: Those that a schema must see, whatever checksums say; and all.
NEVER_VALID: tuple[Callable[[Path, random.Random], None], ...] = (header_bomb, other_dtype, other_shape, overlapping)
TENSORS = (header_bomb, other_dtype, other_shape, other_names, overlapping)


def swap(file: Path, other: Path) -> None:
    """Put another file's content into ``file``."""
    shutil.copyfile(other, file)
