"""Cases of configs: strange values, texts that are none, changed bytes."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import damage
from case import Case, Must
from example import CONFIG


@cache
def _all_fields() -> dict[str, Any]:
    """Every field of a run by dotted name, with its default."""
    from dataclasses import asdict

    from birthmark.models.config import dotted
    from birthmark.trainer.config import RunConfig

    return dotted(asdict(RunConfig()))


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *groups, last = name.split(".")
    for group in groups:
        below = tree.get(group)
        tree[group] = tree = below if isinstance(below, dict) else {}
    tree[last] = value


def config_values(rng: random.Random, example: Path) -> Case:
    """A config with one to three strange values."""
    fields: dict[str, Any] = json.loads(json.dumps(CONFIG))
    names = rng.sample(sorted(_all_fields()), rng.choice([1, 1, 1, 2, 3]))
    values = {name: damage.deep(80) if rng.random() < 0.02 else rng.choice(damage.HOSTILE) for name in names}
    groups = rng.random() < 0.1
    for name, value in values.items():
        _put(fields, name.split(".")[0] if groups else name, value)
    style = rng.choice(["plain", "plain", "dotted", "unknown"])
    if style == "unknown":
        fields[rng.choice(["modle", "model.d_modle", "trainer", "", "1", "__class__", "config"])] = 3

    def prepare(folder: Path) -> Must:
        (folder / "strange.yaml").write_text(_yaml(fields), encoding="utf-8")
        return "any"

    about = f"strange.yaml with {values!r:.300}"
    # A model that is not there is told by its name, which is a value here.
    words = ("strange.yaml", *leaves(names), *(f"{value}:" for value in values.values() if isinstance(value, str)))
    return Case(about, ("corpus",), prepare, _of_config(rng, "strange.yaml"), words)


def leaves(names: list[str]) -> tuple[str, ...]:
    return tuple(name.rpartition(".")[2] for name in names)


def _yaml(tree: Any) -> str:
    """YAML that may hold what no YAML should, as JSON of it."""
    return json.dumps(tree, indent=1)


def _of_config(rng: random.Random, file: str) -> tuple[str, ...]:
    commands = [
        ("describe", file),
        ("describe", file, "--json"),
        ("birth", file, "--json"),
        ("plan", file, "--n_gpus", "1", "--alone", "--gpu", rng.choice(["cpu", "h100-80gb"])),
        ("snapshot", f"{file}@{rng.choice([0, 7])}", "--json", "--n_sequences", "4", "--seq_len", "8"),
    ]
    # All read it alike; then the last two compute, which takes several times as long.
    return rng.choices(commands, [3, 3, 3, 1, 2])[0]


_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)

#: Texts that are no config, or none that may be taken.
TEXTS: dict[str, bytes] = {
    "a bomb of anchors": (_BOMB + "model: *a11\n").encode(),
    "a bomb of merges": b"model: &m {d_model: 16}\nx: &x {<<: [*m, *m]}\ny: {<<: [*x, *x, *x]}\n",
    "a list in itself": b"model: &m [*m]\n",
    "a mapping in itself": b"model: &m {d_model: 16, model: *m}\n",
    "deep lists": b"model: " + b"[" * 3000 + b"]" * 3000,
    "very deep lists": b"model: " + b"[" * 200_000,
    "deep mappings": b"".join(b" " * i + b"a:\n" for i in range(1500)),
    "deep flow mappings": b"{a: " * 20_000,
    "many dashes": b"- " * 30_000,
    "100 MB of text": b"name: " + b"x" * 100_000_000,
    "a million fields": b"".join(b"k%d: 1\n" % i for i in range(1_000_000)),
    "a tag of Python": b"name: !!python/object/apply:os.system ['touch ../watched/tag']\n",
    "another tag of Python": b"name: !!python/name:os.system\nmodel: !!python/tuple [1]\n",
    "a binary": b"name: !!binary aGVsbG8=\n",
    "a set": b"model: !!set {d_model, n_layers}\n",
    "a date": b"name: 2001-01-01\ninit_seed: 2001-12-14t21:59:43.10-05:00\n",
    "a number with colons": b"init_seed: 190:20:30\n",
    "an octal number": b"init_seed: 0o14\ntrainer: {max_steps: 010}\n",
    "a field twice": b"init_seed: 1\ninit_seed: 2\n",
    "a number as a key": b"1: 2\n[1, 2]: 3\n",
    "a mapping as a key": b"? {a: 1}\n: 2\n",
    "two documents": b"init_seed: 1\n---\ninit_seed: 2\n",
    "no documents": b"---\n...\n",
    "a comment": b"# nothing\n",
    "a tab": b"model:\n\td_model: 16\n",
    "no UTF-8": b"name: \xff\xfe\x80\n",
    "UTF-16": "init_seed: 1\n".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbfinit_seed: 1\n",
    "a NUL": b"name: a\0b\n",
    "an escaped NUL": b'name: "a\\0b"\nrun_dir: "r\\0"\n',
    "a lone surrogate": b'name: "\\ud800"\n',
    "a long name": b"run_dir: " + b"x" * 3000 + b"\n",
    "a huge number": b"init_seed: " + b"9" * 10_000 + b"\n",
    "a list": b"- a\n- b\n",
    "a word": b"word\n",
    "null": b"null\n",
    "an unknown alias": b"model: *nothing\n",
    "an open quote": b"name: 'x\n",
    "an open brace": b"model: {d_model: 16\n",
    "a directive": b"%YAML 9.9\n---\nname: x\n",
}
#: Those that may be taken, for what they say.
_TAKEN = {"a bomb of merges", "an octal number", "a byte order mark", "a number with colons"}


def config_text(rng: random.Random, example: Path) -> Case:
    """A file that is no config."""
    about = rng.choice(list(TEXTS))

    def prepare(folder: Path) -> Must:
        (folder / "strange.yaml").write_bytes(TEXTS[about])
        return "any" if about in _TAKEN else "refuse"

    file, names = "strange.yaml", ("strange.yaml", "name", "init_seed", "run_dir")
    return Case(f"strange.yaml is {about}", (), prepare, _of_config(rng, file), names)


def config_file(rng: random.Random, example: Path) -> Case:
    """A config of bytes that were changed, or something else in its place."""
    way = rng.choice([*damage.BYTES, *damage.PLACE])

    def prepare(folder: Path) -> Must:
        way(folder / "tiny.yaml", rng)
        return "any"

    names = ("tiny.yaml", *leaves(list(_all_fields())))
    return Case(f"{way.__name__} tiny.yaml", ("tiny.yaml", "corpus"), prepare, _of_config(rng, "tiny.yaml"), names)
