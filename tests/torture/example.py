"""What the torture is done to: a tiny run with all its files, tables of text, a study, an export."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import yaml
from sandbox import in_memory, run_forked

sys.path.append(str(Path(__file__).parents[1]))
from forked_python import build_what_is_kept

#: Fields of the run. Paths are relative to the folder that everything stands in, which is copied for each case.
CONFIG = {
    "name": "tiny",
    "run_dir": "run",
    "init_seed": 3,
    "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 260, "max_seq_len": 12, "mlp": "swiglu"},
    "data": {"path": "corpus", "data_seed": 5, "val_fraction": 0.3, "cache_dir": "cache"},
    "optim": {"lr": 0.01, "warmup_steps": 1},
    "trainer": {"max_steps": 4, "micro_batch_size": 2, "global_batch_size": 2, "checkpoint_every": 2}
    | {"log_every": 1, "val_sequences": 2, "device": "cpu"},
    "snapshot": {"n_sequences": 8, "seq_len": 8, "batch_size": 8, "top_k": 5, "n_strangers": 1},
    "log": {"wandb": "off"},
}
STUDY: dict[str, Any] = {
    "name": "tiny",
    "base": "tiny.yaml",
    "init_seeds": [0, 1],
    "arms": {"plain": {}, "headnorm": {"model.attention.aggregation": "headnorm"}},
    "families": {"both": ["plain", "headnorm"]},
}
#: The corpus as rows, in every format; as compressed rows and text; and as tokens.
TABLES = ("rows.parquet", "rows.arrow", "rows.jsonl", "rows.csv", "rows.jsonl.gz", "text.txt.zst")
TOKENS = ("tokens.npy", "tokens.bin", "tokens.idx")
#: What the process that cases are forked from does once. Its run and config have names of their own: what is kept by
#: a path cannot be taken for a case's.
_REHEARSAL = (
    ("describe", "other.yaml", "--json"),
    ("birth", "other.yaml", "--json"),
    ("plan", "other.yaml", "--n_gpus", "1", "--alone", "--gpu", "cpu"),
    ("data", "other.yaml", "--step", "1", "--json"),
    ("snapshot", "other", "--json", "--n_sequences", "4", "--seq_len", "8"),
    ("snapshot", "theirs", "--json", "--n_sequences", "4", "--seq_len", "8"),
    ("report", "other", "--json"),
    ("sample", "other", "--prompt", "the"),
    ("export", "other", "new"),
    ("fingerprint", "other", "other@0", "--json", "--n_inputs", "20"),
    ("identify", "other", "--seeds", "2..4", "--json", "--n_inputs", "20"),
    ("ablate", "study.yaml", "--summary", "--out", "results"),
)
_TEXT = "the seed of a model leaves its mark on every head and every head shows it to the one who looks"


def load_everything() -> None:
    """Import what commands import, once, before any process is forked; no thread is started."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "COLUMNS": "200"}
    os.environ |= {"MPLBACKEND": "agg", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    import birthmark

    others = ("matplotlib.pyplot", "scipy.stats", "datasets", "rich.console")
    others += ("transformers.models.llama.modeling_llama",)
    ours = (module.name for module in walk_packages(birthmark.__path__, "birthmark."))
    left_out = re.compile(r"birthmark\.(tests|benchmarks|setup)\b|.*_kernel$")  # the last are for a GPU, with Triton
    for name in (*others, *(name for name in ours if not left_out.match(name))):
        import_module(name)
    build_what_is_kept(sys.modules["birthmark.launch.command_table"].COMMANDS)


def command(arguments: Sequence[str]) -> Callable[[], int]:
    """The ``birthmark`` command with these arguments, as the process of a case runs it."""

    def do() -> int:
        import torch

        from birthmark.launch.cli import main

        torch.set_num_threads(1)
        return main(list(arguments))

    return do


def _threads() -> list[str]:
    """Names of this process's threads."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def rehearse(example: Path) -> None:
    """Run commands on a copy of the example in this process: forked ones find what code keeps from its first use on.

    That is a quarter of what they would compute: types of fields, expressions, kernels, fonts.
    """
    import torch

    before, environment, here = _threads(), dict(os.environ), Path.cwd()
    # The first backward pass starts a thread for each device. Built for CUDA, torch has eight as soon as a tensor was
    # fake, as in plans, and none before that.
    torch.ones((), requires_grad=True).backward()
    with tempfile.TemporaryDirectory(dir=in_memory()) as root:
        folder = Path(root, "rehearsal")
        shutil.copytree(example, folder)
        for name in ("run", "tiny.yaml"):
            (folder / name).rename(folder / name.replace("run", "other").replace("tiny", "other"))
        (folder / "study.yaml").write_text(yaml.safe_dump(STUDY | {"base": "other.yaml"}, sort_keys=False))
        os.chdir(folder)
        try:
            for arguments in _REHEARSAL:
                with contextlib.redirect_stdout(io.StringIO()):
                    assert command(arguments)() == 0, arguments
        finally:
            os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    threads = _threads()
    assert len(threads) == len(before), f"a process with threads must not fork: {threads}, before {before}"


def _write_tables(folder: Path, texts: Sequence[str]) -> int:
    import datasets

    table = datasets.Dataset.from_dict({"text": [line for text in texts for line in text.splitlines()]})
    import gzip
    import struct

    import numpy as np
    import pyarrow

    parquet, arrow, lines, cells, packed, pressed = (folder / name for name in TABLES)
    table.to_parquet(parquet)
    table.to_json(lines)
    table.to_csv(cells)
    with datasets.arrow_writer.ArrowWriter(path=str(arrow)) as writer:
        writer.write_table(table.data.table)
        writer.finalize()
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    with pyarrow.output_stream(str(pressed), compression="zstd") as file:
        file.write("\n".join(texts).encode())
    documents = [np.frombuffer(line.encode(), np.uint8).astype("<u2") for text in texts for line in text.splitlines()]
    array, flat, index = (folder / name for name in TOKENS)
    np.save(array, np.concatenate(documents))
    flat.write_bytes(b"".join(document.tobytes() for document in documents))
    # Megatron-LM's index: each document is a sequence of its own.
    n, lengths = len(documents), [len(document) for document in documents]
    starts = [2 * sum(lengths[:i]) for i in range(n)]
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n, n + 1)
    rest = struct.pack(f"<{n}i", *lengths) + struct.pack(f"<{n}q", *starts) + struct.pack(f"<{n + 1}q", *range(n + 1))
    index.write_bytes(head + rest)
    return 0


def _study_runs() -> list[list[str]]:
    """The commands of the runs that the study is made of."""
    commands = []
    for arm, fields in STUDY["arms"].items():
        for seed in STUDY["init_seeds"]:
            own = {"init_seed": seed, "name": f"{STUDY['name']}-{arm}-{seed}", "run_dir": f"results/{arm}/seed-{seed}"}
            options = [f"--{name}={value}" for name, value in {**own, **fields}.items()]
            commands.append(["pretrain", "--config", "tiny.yaml", *options])
    return commands


def _without_page(arguments: Sequence[str]) -> Callable[[], int]:
    """A run whose page, which takes longer than it, nobody reads."""

    def do() -> int:
        import_module("birthmark.trainer.run")._write_report = lambda run: None  # type: ignore[attr-defined]
        return command(arguments)()

    return do


def make_example(folder: Path) -> None:
    """Fill an empty folder; takes some seconds."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for i in range(6):
        words = _TEXT.split()
        text = " ".join(words[(i * j * j + 3 * j) % len(words)] for j in range(120))
        (corpus / f"{i}.txt").write_text(text.replace(" head", ".\nhead"))
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    assert run_forked(lambda: _write_tables(folder, texts), folder, wall=300, memory=4 << 30).status == 0
    for name, fields in (("tiny.yaml", CONFIG), ("study.yaml", STUDY)):
        (folder / name).write_text(yaml.safe_dump(fields, sort_keys=False))
    for do in (
        command(["pretrain", "--config", "tiny.yaml"]),
        command(["export", "run", "theirs"]),
        command(["certify", "run", "--out", "stated.json"]),
        command(["snapshot", "run", "--out", "measured", "--n_sequences", "4", "--seq_len", "8"]),
        *map(_without_page, _study_runs()),
    ):
        outcome = run_forked(do, folder, wall=300, memory=4 << 30)
        assert outcome.status == 0, outcome
    # One run of the study failed at its first start.
    (folder / "results" / next(iter(STUDY["arms"])) / f"seed-{STUDY['init_seeds'][0]}.failed.jsonl").write_text(
        '{"status": -9, "reason": "killed"}\n{"status": 1, "reason": "the disk is full"}\n'
    )
    (folder / "run" / "certificate.secret.json").unlink()  # a run is damaged as its training left it
