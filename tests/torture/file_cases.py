"""Cases of what is on the disk: runs, checkpoints, snapshots, studies, tokens, and folders of transformers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import damage
from case import Case, Must
from config_cases import TEXTS
from damage_of_files import damage_file
from example import STUDY, TABLES, TOKENS

PROBE = ("--n_sequences", "4", "--seq_len", "8")

#: What reads which files of a run; those that train or draw take longest and come seldom.
_READERS: list[tuple[tuple[str, ...], tuple[str, ...], int]] = [
    (("report", "run", "--json"), ("birth.json", "metrics.jsonl", "summary.json", "arrays.safetensors"), 8),
    (("report", "run", "--step", "2", "--json"), ("summary.json", "arrays.safetensors"), 4),
    (("snapshot", "run", "--json", *PROBE), ("config.yaml", "state.json", "tensors.safetensors", "tokenizer.json"), 5),
    (("snapshot", "run@2", "--json", *PROBE), ("config.yaml", "state.json", "tensors.safetensors"), 3),
    (("snapshot", "run/checkpoints/step-00000002", "--json", *PROBE), ("state.json", "tensors.safetensors"), 2),
    (("sample", "run", "--prompt", "the"), ("config.yaml", "tokenizer.json", "state.json", "tensors.safetensors"), 4),
    (("export", "run", "new"), ("config.yaml", "tokenizer.json", "state.json", "tensors.safetensors"), 3),
    (("fingerprint", "run", "run@0", "--json", "--n_inputs", "20"), ("config.yaml", "state.json"), 2),
    (("identify", "run", "--seeds", "2..4", "--json", "--n_inputs", "20"), ("config.yaml", "tensors.safetensors"), 2),
    (("intervene", "run", "--kind", "mask", "--layer", "1", "--position", "0", "--json", *PROBE), ("state.json",), 1),
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
    ("snapshot", "theirs", "--json", *PROBE),
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
    """A corpus of rows, compressed text or tokens that was damaged, and what reads it."""
    file, way = rng.choice([*TABLES, *TOKENS]), rng.choice([*damage.BYTES, *damage.PLACE])

    def prepare(folder: Path) -> Must:
        way(folder / file, rng)
        return "any"

    # Megatron-LM's tokens and their index name each other.
    parts, read = (TOKENS[1:], TOKENS[1]) if file in TOKENS[1:] else ((file,), file)
    words = (file, read, "data.path", "data.text_field", "data.tokenizer", "data.token_dtype", "vocab_size")
    return Case(f"{way.__name__} {file}", ("tiny.yaml", *parts), prepare, _of_data(rng, read), words)


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
