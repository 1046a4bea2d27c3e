"""What `birthmark snapshot` does: one measurement of a model of any kind, for people, as JSON or as a snapshot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ...data.probes import random_probe
from ...data.tokenizer import TextTokenizer
from ...errors import RunError, UsageError
from ...files import strict
from ...measure.config import SnapshotConfig
from ...measure.foreign import ForeignModel
from ...measure.measurement import birth_reference, measure
from ...measure.recorder import snapshot_of
from ...measure.records import RunDir, Snapshot
from ...models.decoder import Decoder
from ...models.exchange.pretrained import is_path
from ...report.terminal import print_json
from ...report.text import format_value
from ...trainer.devices import device
from ...trainer.model_names import no_such_model, open_native
from ..options import check_probe

#: The step of a snapshot of a model whose training is not known.
UNKNOWN_STEP = -1


@dataclass(frozen=True)
class Subject:
    """A model to be measured."""

    model: Decoder | ForeignModel
    newborn: Callable[[], Decoder] | None
    """Re-creates its birth, where that is known."""
    step: int
    tokenizer: Path | None


def open_subject(name: str, step: int | None, dtype: torch.dtype) -> Subject:
    """Load a model by any of its names; of ``transformers`` also one that our decoder cannot be.

    Raises:
        UsageError: there is no such model, or it cannot be measured.
        RunError: a damaged file.
    """
    if step is not None and step < 0:
        raise UsageError(f"--step {step}: give 0 or more")
    if step is not None and RunDir.is_run(Path(name)):
        name, step = f"{name}@{step}", None
    source = open_native(name)
    if source is None:
        return _foreign(name, UNKNOWN_STEP if step is None else step, dtype)
    if step is not None:
        raise UsageError(f"--step {step}: {name} says its step itself; leave one of them out")
    return Subject(source.load().to(dtype), lambda: source.birth().to(dtype), source.step, source.tokenizer)


def _foreign(name: str, step: int, dtype: torch.dtype) -> Subject:
    """A folder of transformers or a hub id; nothing is unpickled and no code of the model's own is run."""
    try:
        if not torch.cuda.is_available():
            # DeepSpeed, which transformers imports where it is, would tell on standard output that it sees no GPU.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from transformers import AutoModelForCausalLM, logging
        from transformers.utils.hub import cached_file
    except ImportError:
        raise UsageError(f"measuring {name} needs transformers: pip install transformers") from None
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file() and (folder.exists() or is_path(name)):
        raise no_such_model(name)
    where, revision = (str(folder), "") if folder.is_dir() else (name.partition("@")[0], name.partition("@")[2])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            revision=revision or "main",
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # the library and the hub's transport raise a dozen kinds, of several sentences each
        reason = " ".join(str(error).split())[:200].split(". ")[0]
        raise UsageError(f"{name}: transformers cannot load it ({reason})") from None
    model, said = loaded
    if missing := sorted(said["missing_keys"]) + sorted(str(key) for key in said["mismatched_keys"]):
        raise RunError(f"{name}: {missing[0]} is missing or of another shape: its values would be random")
    tokenizer = None
    with suppress(Exception):  # a model without one is measured all the same
        tokenizer = cached_file(where, "tokenizer.json", revision=revision or "main")
    return Subject(ForeignModel(model), None, step, None if tokenizer is None else Path(tokenizer))


def _probe(subject: Subject, parsed: Namespace) -> np.ndarray:
    """The random probe; refuses what cannot be measured or read."""
    config = subject.model.config
    longest = config.max_seq_len
    default = SnapshotConfig.seq_len if longest is None else min(SnapshotConfig.seq_len, longest)
    seq_len = default if parsed.seq_len is None else parsed.seq_len
    settings = SnapshotConfig(
        n_sequences=parsed.n_sequences, seq_len=seq_len, batch_size=parsed.batch_size, sink_epsilon=parsed.sink_epsilon
    )
    table = isinstance(subject.model, ForeignModel) or subject.model.config.positions == "learned"
    check_probe(settings, longest if table else None)
    return random_probe(config.vocab_size, parsed.n_sequences, seq_len, parsed.probe_seed)


def take(subject: Subject, parsed: Namespace) -> Snapshot:
    """Measure ``subject`` as the options say."""
    model, probe_NT = subject.model.to(device()), _probe(subject, parsed)
    birth = None
    if subject.newborn is not None:
        birth = birth_reference(subject.newborn().to(device()), probe_NT, parsed.batch_size)
    start = time.perf_counter()
    try:
        found = measure(model, probe_NT, birth, batch_size=parsed.batch_size, sink_epsilon=parsed.sink_epsilon)
    except (RunError, UsageError) as error:
        raise type(error)(f"{parsed.model}: {error}") from None
    seconds = time.perf_counter() - start
    tokenizer = None if subject.tokenizer is None else TextTokenizer.load(subject.tokenizer)
    return snapshot_of(
        model,
        found,
        probe_NT,
        parsed.probe_seed,
        about={"step": subject.step, "source": parsed.model},
        seconds=seconds,
        birth=birth,
        top_k=SnapshotConfig.top_k,
        token_texts=None if tokenizer is None else tokenizer.token_texts,
    )


#: Columns of the table of blocks: name in JSON, heading, from the arrays, format. Those of L + 1 rows begin with the
#: embeddings.
_COLUMNS: Sequence[tuple[str, str, Callable[[dict[str, np.ndarray]], np.ndarray], str]] = (
    ("inter", "inter", lambda a: a["inter_mlp"], ".3f"),
    ("intra", "intra", lambda a: a["intra_mlp"], ".3f"),
    ("alignment", "align-\nment", lambda a: a["alignment"], ".3f"),
    ("sink_mass", "sink\nmass", lambda a: a["sink_mass"].mean(1), ".3f"),
    ("sink_mass_max", "most in\na head", lambda a: a["sink_mass"].max(1), ".3f"),
    ("sink_rate", "sink\nrate %", lambda a: a["sink_rate"].mean(1), ".1f"),
    ("n_eff", "n_eff\nat T", lambda a: a["n_eff"][..., -1].mean(1), "ratio"),
    ("variance_discrepancy", "variance\ndiscr.", lambda a: a["variance_discrepancy"], "ratio"),
    ("super_neurons", "super\nneurons", lambda a: a["super_neurons"], ",d"),
    ("dominance_first", "domi-\nnance", lambda a: a["dominance"][:, 0], "ratio"),
    ("massive", "largest\n|h|", lambda a: a["massive_value"][:, 0], "ratio"),
    ("effective_rank", "eff.\nrank", lambda a: a["effective_rank"], "ratio"),
    ("qk_cosine", "QK\nlock", lambda a: a["qk_cosine"].mean(1), ".3f"),
)


def layers(snapshot: Snapshot) -> list[dict[str, float]]:
    """Figures of the embeddings (layer 0) and of every block, means over heads; what a row has not is left out."""
    rows: list[dict[str, float]] = [{"layer": layer} for layer in range(snapshot.summary["n_layers"] + 1)]
    for name, _, values_of, _ in _COLUMNS:
        if name == "alignment" and name not in snapshot.arrays:
            continue
        values = values_of(snapshot.arrays)
        for row, value in zip(rows[len(rows) - len(values) :], values, strict=True):
            row[name] = float(value)
    return rows


#: Columns that give way where the terminal is narrow, first to last.
_GIVE_WAY = ("sink_mass_max", "variance_discrepancy", "qk_cosine", "dominance_first", "effective_rank", "sink_rate")


def _table(rows: list[dict[str, float]], left_out: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("block", justify="right", no_wrap=True)
    shown = [column for column in _COLUMNS if column[0] not in left_out and any(column[0] in row for row in rows)]
    for _, title, _, _ in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [format_value(row.get(name), spec) for name, _, _, spec in shown]
        table.add_row(str(int(row["layer"]) or "embed"), *cells)
    return table


def _print(snapshot: Snapshot, console: Console) -> None:
    probe, rows = snapshot.summary["probe"], layers(snapshot)
    for n in range(len(_GIVE_WAY) + 1):
        table = _table(rows, _GIVE_WAY[:n])
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width:
            break
    console.print(table)
    console.print()
    grid = Table.grid(padding=(0, 2))
    told = [(name, f"{value:.4g}") for name, value in snapshot.bias.items()]
    columns = 3 if console.width >= 110 else 2 if console.width >= 70 else 1
    for start in range(0, len(told), columns):
        grid.add_row(*(part for pair in told[start : start + columns] for part in pair))
    console.print(grid)
    tokens = "  ".join(token["text"] for token in snapshot.summary["top_tokens"][:10])
    console.print(f"\nfavourite tokens: {tokens}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{probe['n_sequences']} sequences of {probe['seq_len']} random tokens, {probe['dtype']}, "
        f"{snapshot.summary['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def figures(snapshot: Snapshot) -> dict[str, object]:
    """Everything that --json prints of a snapshot."""
    summary = {name: value for name, value in snapshot.summary.items() if name != "bias"}
    return strict(summary | {"scalars": snapshot.bias, "layers": layers(snapshot)})


def snapshot(parsed: Namespace) -> int:
    """Measure one model."""
    out = None if parsed.out is None else Path(parsed.out)
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists already; give a new folder")
    subject = open_subject(parsed.model, parsed.step, getattr(torch, parsed.dtype))
    found = take(subject, parsed)
    if out is not None:
        found.write(out)
    if parsed.json:
        print_json(figures(found))
    else:
        _print(found, Console())
    return 0
