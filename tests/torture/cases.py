"""Cases: a command, what is damaged before it, and what it must say. The n-th of a seed is always the same."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import damage
from example import CONFIG, STUDY, TABLES

#: ``refuse``: status 0 is a fault. ``same``: refused, or what the undamaged input gives. ``any``: refused or accepted.
Must = Literal["refuse", "same", "any"]


@dataclass(frozen=True)
class Case:
    """One input."""

    about: str
    """What is done to it, for a person."""
    parts: tuple[str, ...]
    """Of the example, what it needs."""
    prepare: Callable[[Path], Must]
    """Damages the copy in a folder; what must come of it."""
    arguments: tuple[str, ...]
    """The command."""
    names: tuple[str, ...]
    """Words of which a refusal must have one."""


def make_case(seed: int, number: int, example: Path) -> Case:
    """The ``number``-th case of ``seed``, done to an example that stands in ``example``."""
    rng = random.Random(f"{seed}:{number}")
    kinds = list(KINDS)
    kind = rng.choices(kinds, [KINDS[k][1] for k in kinds])[0]
    return KINDS[kind][0](rng, example)


# ── configs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _all_fields() -> dict[str, Any]:
    """Every field of a run by dotted name, with its default."""
    from dataclasses import asdict

    from birthmark.models.dotted import dotted
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
    words = ("strange.yaml", *_leaves(names), *(f"{value}:" for value in values.values() if isinstance(value, str)))
    return Case(about, ("corpus",), prepare, _of_config(rng, "strange.yaml"), words)


def _leaves(names: list[str]) -> tuple[str, ...]:
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

    names = ("tiny.yaml", *_leaves(list(_all_fields())))
    return Case(f"{way.__name__} tiny.yaml", ("tiny.yaml", "corpus"), prepare, _of_config(rng, "tiny.yaml"), names)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_PROBE = ("--n_sequences", "4", "--seq_len", "8")

#: What reads which files of a run; those that train or draw take longest and come seldom.
_READERS: list[tuple[tuple[str, ...], tuple[str, ...], int]] = [
    (("report", "run", "--json"), ("birth.json", "metrics.jsonl", "summary.json", "arrays.safetensors"), 8),
    (("report", "run", "--step", "2", "--json"), ("summary.json", "arrays.safetensors"), 4),
    (("snapshot", "run", "--json", *_PROBE), ("config.yaml", "state.json", "tensors.safetensors", "tokenizer.json"), 5),
    (("snapshot", "run@2", "--json", *_PROBE), ("config.yaml", "state.json", "tensors.safetensors"), 3),
    (("snapshot", "run/checkpoints/step-00000002", "--json", *_PROBE), ("state.json", "tensors.safetensors"), 2),
    (("sample", "run", "--prompt", "the"), ("config.yaml", "tokenizer.json", "state.json", "tensors.safetensors"), 4),
    (("export", "run", "new"), ("config.yaml", "tokenizer.json", "state.json", "tensors.safetensors"), 3),
    (("fingerprint", "run", "run@0", "--json", "--n_inputs", "20"), ("config.yaml", "state.json"), 2),
    (("identify", "run", "--seeds", "2..4", "--json", "--n_inputs", "20"), ("config.yaml", "tensors.safetensors"), 2),
    (("intervene", "run", "--kind", "mask", "--layer", "1", "--position", "0", "--json", *_PROBE), ("state.json",), 1),
    (("describe", "run/config.yaml", "--json"), ("config.yaml",), 2),
    (("birth", "run/config.yaml", "--json"), ("config.yaml",), 2),
    (
        ("pretrain", "--resume", "run"),
        ("config.yaml", "birth.json", "metrics.jsonl", "state.json", "tensors.safetensors", "meta.json", "*.bin"),
        1,
    ),
    (
        ("plan", "tiny.yaml", "--set", "init_from=run", "--n_gpus", "1", "--alone", "--json"),
        ("config.yaml", "state.json"),
        1,
    ),
    (("report", "run", "run", "--json"), ("metrics.jsonl", "summary.json"), 1),
    (("report", "run", "--out", "page.html"), ("metrics.jsonl", "summary.json", "arrays.safetensors"), 0),
]

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


def run_file(rng: random.Random, example: Path) -> Case:
    """A run of which one file was damaged."""
    arguments, names, _ = rng.choices(_READERS, [weight for *_, weight in _READERS])[0]
    name = rng.choice(names)
    training = arguments[0] == "pretrain"
    found = sorted(f for root in ("run", "cache")[: 1 + training] for f in example.glob(f"{root}/**/{name}"))
    file = rng.choice(found).relative_to(example)
    others = [f for f in sorted(example.glob("run/**/*")) if f.is_file() and f.name != name and f.suffix != ".html"]
    # What depends on the example's bytes is decided when they are damaged.
    state = rng.random()

    def prepare(folder: Path) -> Must:
        beside = [folder / other.relative_to(example) for other in others]
        return damage_file(folder / file, random.Random(state), beside)[1]

    parts = ("run", "corpus", "tiny.yaml", "cache")[: 3 + training]
    words = (name, file.parent.name, "run.", "run:", "run/", "init_from")
    return Case(f"{file}, damaged by {state}", parts, prepare, arguments, words)


def strange_folder(rng: random.Random, example: Path) -> Case:
    """A checkpoint or a snapshot under a name that is no step's."""
    kind = rng.choice(["checkpoints", "snapshots"])
    name = f"step-{rng.choice(['١٢', '1e3', '', '-1', '0x10', '2', '99999999999999999999', ' 2', '00000007'])}"
    arguments = rng.choice([a for a, names, w in _READERS if w and a[0] in ("report", "snapshot", "export", "sample")])
    copied = rng.random() < 0.5

    def prepare(folder: Path) -> Must:
        source = folder / "run" / kind / "step-00000002"
        (shutil.copytree if copied else shutil.move)(source, source.with_name(name))
        return "same"

    about = f"run/{kind}/step-00000002 {'copied' if copied else 'moved'} to {name}"
    return Case(about, ("run", "corpus"), prepare, arguments, (name, "step 2", "--step", "step-00000002"))


# ── what is not a run ────────────────────────────────────────────────────────────────────────────────────────────────


def snapshot_file(rng: random.Random, example: Path) -> Case:
    """A snapshot alone of which one file was damaged."""
    name, state = rng.choice(["summary.json", "arrays.safetensors"]), rng.random()
    arguments = ("report", "measured", "--json")

    def prepare(folder: Path) -> Must:
        return damage_file(folder / "measured" / name, random.Random(state), [])[1]

    return Case(f"measured/{name}, damaged by {state}", ("measured",), prepare, arguments, (name, "measured"))


_THEIR_COMMANDS = (
    ("snapshot", "theirs", "--json", *_PROBE),
    ("fingerprint", "theirs", "theirs", "--json", "--n_inputs", "20", "--seq_len", "8"),
    ("plan", "tiny.yaml", "--set", "init_from=theirs", "--n_gpus", "1", "--alone", "--json"),
)


def their_folder(rng: random.Random, example: Path) -> Case:
    """A folder of transformers of which something was damaged."""
    name, state = rng.choice(["config.json", "config.json", "model.safetensors", "tokenizer.json"]), rng.random()
    arguments = rng.choice(_THEIR_COMMANDS)

    def prepare(folder: Path) -> Must:
        how, must = damage_file(folder / "theirs" / name, random.Random(state), [])
        # Their files have no checksum: another word in the vocabulary is as good, and half precision as single.
        return "any" if name == "tokenizer.json" or how.startswith("other_dtype") else must

    words = (name, "theirs", "init_from")
    return Case(f"theirs/{name}, damaged by {state}", ("theirs", "tiny.yaml", "corpus"), prepare, arguments, words)


def their_trap(rng: random.Random, example: Path) -> Case:
    """A folder of transformers that would have us run its code, read elsewhere or allocate the world."""
    traps = ("auto_map", "auto_map alone", "pickle", "pickle as safetensors", "traversal", "index bomb", "depth")
    trap = rng.choice(traps)

    def prepare(folder: Path) -> Must:
        theirs, touch = folder / "theirs", "open('../watched/code', 'w').close()\n"
        config = json.loads((theirs / "config.json").read_text())
        if trap.startswith("auto_map"):
            (theirs / "modeling_x.py").write_text(touch)
            config["auto_map"] = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
            if trap.endswith("alone"):
                config["model_type"] = "of_its_own"
        elif trap == "pickle":
            damage.pickled(theirs / "pytorch_model.bin", rng)
            (theirs / "model.safetensors").unlink()
        elif trap == "pickle as safetensors":
            damage.pickled(theirs / "model.safetensors", rng)
        elif trap == "depth":
            config |= {"num_hidden_layers": 10**9} if rng.random() < 0.5 else {"vocab_size": 10**12}
        else:
            (theirs / "model.safetensors").rename(theirs / "model-1.safetensors")
            header, _ = damage.read_safetensors(theirs / "model-1.safetensors")
            outside = "../../watched/canary.safetensors" if trap == "traversal" else "model-1.safetensors"
            weight_map: Any = dict.fromkeys(header, outside)
            if trap == "index bomb":
                weight_map = rng.choice([[1], 3, dict.fromkeys(header, 3), dict.fromkeys(header, "/dev/zero")])
            (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (theirs / "config.json").write_text(json.dumps(config))
        return "any" if trap == "auto_map" else "refuse"

    words = ("theirs", "init_from")
    arguments = rng.choice(_THEIR_COMMANDS)
    return Case(f"theirs with {trap}", ("theirs", "tiny.yaml", "corpus"), prepare, arguments, words)


def study(rng: random.Random, example: Path) -> Case:
    """A study file with strange values or bytes."""
    fields = json.loads(json.dumps(STUDY))
    way = rng.choice(["value", "value", "text", "bytes"])
    text = rng.choice(list(TEXTS))
    if way == "value":
        fields, _ = damage.change_json(fields, rng)

    def prepare(folder: Path) -> Must:
        file = folder / "study.yaml"
        if way == "value":
            file.write_text(damage.json_text(fields), encoding="utf-8")
        elif way == "text":
            file.write_bytes(TEXTS[text])
        else:
            rng.choice([*damage.BYTES, *damage.PLACE])(file, rng)
        return "refuse"  # no run of it is there

    names = ("study.yaml", *STUDY, "s:", "tiny.yaml", "--out", "no such file")
    arguments = ("ablate", "study.yaml", "--summary", "--out", "s")
    about = (
        f"study.yaml: {damage.json_text(fields)[:200]}"
        if way == "value"
        else f"study.yaml: {text if way == 'text' else way}"
    )
    return Case(about, ("study.yaml", "tiny.yaml", "corpus"), prepare, arguments, names)


def tokens(rng: random.Random, example: Path) -> Case:
    """A cache of tokens, a corpus or a tokenizer that was damaged, and what reads it."""
    files = [*example.glob("cache/**/*.*"), *example.glob("corpus/*")]
    file = rng.choice([f.relative_to(example) for f in sorted(files) if f.is_file() and f.suffix != ".lock"])
    way, state = rng.choice(["file", "file", "line"]), rng.random()

    def prepare(folder: Path) -> Must:
        if way == "line":
            corpus = folder / "corpus" / "line.txt"
            corpus.write_text("".join(random.Random(state).choices("abcdefghijklmnopqrstuvwxyz", k=3_000_000)))
            return "any"
        must = damage_file(folder / file, random.Random(state), [])[1]
        return "any" if file.parts[0] == "corpus" else must

    arguments = _of_data(rng)
    words = (file.name, file.parent.name, "data.path", "data.tokenizer", "vocab_size", "corpus")
    about = f"{file}, damaged by {state}" if way == "file" else "a corpus of one line without a space"
    return Case(about, ("tiny.yaml", "corpus", "cache"), prepare, arguments, words)


def _of_data(rng: random.Random, path: str = "corpus") -> tuple[str, ...]:
    """What reads a corpus to its end: mostly a look at a batch, which takes a twentieth of the time of a run."""
    if rng.random() < 0.25:
        run = ("pretrain", "--config", "tiny.yaml", "--run_dir", "second", "--trainer.max_steps", "1")
        return (*run, f"--data.path={path}")
    return ("data", "tiny.yaml", "--set", f"data.path={path}", "--step", "1", "--json")


def table(rng: random.Random, example: Path) -> Case:
    """A corpus of rows that was damaged, and what reads it."""
    file, way = rng.choice(TABLES), rng.choice([*damage.BYTES, *damage.PLACE])

    def prepare(folder: Path) -> Must:
        way(folder / file, rng)
        return "any"

    words = (file, "data.path", "data.text_field", "data.tokenizer", "vocab_size")
    return Case(f"{way.__name__} {file}", ("tiny.yaml", file), prepare, _of_data(rng, file), words)


def study_results(rng: random.Random, example: Path) -> Case:
    """A study that was run, of whose runs one file was damaged."""
    names = ("config.yaml", "birth.json", "metrics.jsonl", "summary.json", "arrays.safetensors", "*.failed.jsonl")
    name, state = rng.choice(names), rng.random()
    file = rng.choice(sorted(example.glob(f"results/*/**/{name}"))).relative_to(example)

    def prepare(folder: Path) -> Must:
        return damage_file(folder / file, random.Random(state), [])[1]

    arguments = ("ablate", "study.yaml", "--summary", "--out", "results")
    words = (file.name, file.parent.name, *(f"{group}/seed-" for group in STUDY["arms"]))
    parts = ("study.yaml", "tiny.yaml", "corpus", "results")
    return Case(f"{file}, damaged by {state}", parts, prepare, arguments, words)


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────

_WORDS = ("", "-1", "0", "3", "1.5", "1e309", "nan", "inf", "1000000000000000000", "9" * 23, "١٢", "null", "true")
_WORDS += ("[", "[[[[[[[[", "{a: 1", "{a: 1}", "!!python/name:os.system", "~nobody-of-this-name/x", "[/b]x", "[bold]")
_WORDS += ("/dev/null", "/dev/zero", "run", "run@4", "run@x", "run@@", "@", "theirs", "measured", "tiny.yaml")
_WORDS += ("tiny.yaml@1", "x" * 5000, "\udcff", "a\nb", "*", "&a [*a]", "[" * 5000, "0..99999999999999", "3,3", "a=b")
_WORDS += ("model.d_model=x",)
_USUAL: dict[str, tuple[str, ...]] = {
    "pretrain": ("--config", "tiny.yaml", "--run_dir", "second", "--trainer.max_steps", "1"),
    "report": ("run", "--json"),
    "describe": ("tiny.yaml",),
    "plan": ("tiny.yaml", "--n_gpus", "1", "--alone"),
    "data": ("tiny.yaml",),
    "birth": ("tiny.yaml",),
    "sample": ("run", "--max_tokens", "3"),
    "export": ("run", "new"),
    "ablate": ("study.yaml", "--summary"),
    "fingerprint": ("run", "run@0", "--n_inputs", "20"),
    "identify": ("run", "--seeds", "0..2", "--n_inputs", "20"),
    "snapshot": ("run", *_PROBE),
    "intervene": ("run", "--kind", "mask", "--layer", "1", "--position", "0", *_PROBE),
    "quantise": ("run", "--bits", "w4a4", "--json", *_PROBE),
    "compare": ("run", "run@0", "--json", *_PROBE),
    "length": ("run", "--to", "12", "--n_sequences", "2", "--batch_size", "2"),
    "adapt": (
        *("run", "--adapter.kind", "lora", "--run_dir", "second", "--data.path", "corpus", "--data.cache_dir", "cache"),
        *("--trainer.max_steps", "1", "--trainer.micro_batch_size", "2", "--trainer.global_batch_size", "2"),
        *("--trainer.device", "cpu", "--log.wandb", "off", "--snapshot.n_sequences", "8", "--snapshot.seq_len", "8"),
    ),
    "audit": ("run",),
    "certify": ("run", "--out", "stated.json"),
    "verify": ("stated.json", "run"),
    "configs": (),
    "completion": ("bash",),
}


def command_line(rng: random.Random, example: Path) -> Case:
    """A command with one option or one word that is strange."""
    from birthmark.launch.command_table import COMMANDS, command_parser

    # A demo is a minute of training; a short run, or a plan, takes as long as ten other commands.
    weights = {name: 0.25 if name in ("pretrain", "adapt", "plan") else 1.0 for name in COMMANDS if name != "demo"}
    name = rng.choices(list(weights), list(weights.values()))[0]
    usual = list(_USUAL.get(name, ()))
    options = sorted({o for action in command_parser(name)._actions for o in action.option_strings if o[:2] == "--"})
    word = rng.choice(_WORDS)
    # They show a traceback, stop, train or serve.
    left_out = ("--debug", "--help", "--print_config", "--resume", "--watch")
    changed = rng.choice([o for o in options if o not in left_out] or ["--x"])
    if usual and rng.random() < 0.3:
        at = rng.randrange(len(usual))
        changed, usual[at] = usual[at], word
    elif changed == "--n_gpus" and rng.random() < 0.5:
        usual += [changed]
    else:
        usual += [f"{changed}={word}"] if rng.random() < 0.5 else [changed, word]
    parts = ("run", "theirs", "measured", "corpus", "cache", "tiny.yaml", "study.yaml", "stated.json")
    # What is wrong may be the word, the option, its neighbour, or what follows from it.
    shown = " ".join(word.split())[:20] or "''"
    words = (changed.lstrip("-"), changed.rpartition(".")[2], shown, *(u.lstrip("-") for u in usual if u), "birthmark")
    return Case(f"{name} {' '.join(usual)!r:.200}", parts, lambda folder: "any", (name, *usual), words)


KINDS: dict[str, tuple[Callable[[random.Random, Path], Case], float]] = {
    "config_values": (config_values, 4),
    "config_text": (config_text, 2),
    "config_file": (config_file, 1),
    "run_file": (run_file, 6),
    "strange_folder": (strange_folder, 0.6),
    "snapshot_file": (snapshot_file, 2),
    "their_folder": (their_folder, 2),
    "their_trap": (their_trap, 0.7),
    "study": (study, 1.2),
    "study_results": (study_results, 1),
    "tokens": (tokens, 0.3),
    "table": (table, 0.3),
    "command_line": (command_line, 4),
}
