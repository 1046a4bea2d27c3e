"""Cases of the command line: one option or one word that is strange."""

from __future__ import annotations

import random
from pathlib import Path

from case import Case
from file_cases import PROBE

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
    "snapshot": ("run", *PROBE),
    "intervene": ("run", "--kind", "mask", "--layer", "1", "--position", "0", *PROBE),
    "quantise": ("run", "--bits", "w4a4", "--json", *PROBE),
    "compare": ("run", "run@0", "--json", *PROBE),
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
