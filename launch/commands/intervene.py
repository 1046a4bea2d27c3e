"""What `birthmark intervene` does: the dose-response table and picture of one intervention."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

from jsonargparse import Namespace
from rich import box
from rich.console import Console
from rich.table import Table

from ...data.probes import random_probe
from ...errors import UsageError
from ...measure.config import SnapshotConfig
from ...measure.interventions import DoseResponse, Kind, check, intervene
from ...report.pictures.dose_response import write_picture
from ...report.terminal import picture_path, print_json
from ...trainer.devices import device
from ...trainer.model_names import open_source
from ..options import check_probe


def _lambdas(text: str) -> list[float]:
    try:
        doses = [float(part) for part in text.split(",")]
    except ValueError:
        doses = [math.nan]
    if not all(map(math.isfinite, doses)):
        raise UsageError(f"--lambda {text}: give numbers with commas between, such as 1,2,4,8")
    return doses


def _print(found: DoseResponse, title: str, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("mask" if found.kind == "mask" else "λ", justify="right")
    for layer in range(found.layer + 1, found.layer + 1 + found.importance.shape[1]):
        table.add_column(f"block {layer}", justify="right", no_wrap=True)
    for dose, of_layers in zip(found.lambdas, found.importance, strict=True):
        name = ("off", "on")[int(dose)] if found.kind == "mask" else f"{dose:g}"
        table.add_row(name, *(f"{heads.mean():.3f} ({heads.max():.3f})" for heads in of_layers))
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    console.print(
        f"importance of key {found.position}, mean (largest) over heads; uniform attention gives {found.uniform:.3f}",
        highlight=False,
        soft_wrap=True,
    )


def intervention(parsed: Namespace) -> int:
    """Intervene on one model."""
    doses = _lambdas(parsed["lambda"])
    out = picture_path(parsed.out, "intervene.png", as_json=parsed.json)
    source = open_source(parsed.model)
    settings = SnapshotConfig(n_sequences=parsed.n_sequences, seq_len=parsed.seq_len, batch_size=parsed.batch_size)
    check_probe(settings, source.config.max_seq_len if source.config.positions == "learned" else None)
    assert parsed.kind in get_args(Kind)
    try:
        check(source.config, parsed.kind, parsed.layer, parsed.position, parsed.seq_len, doses)
    except UsageError as error:
        raise UsageError(f"--{error}") from None
    probe_NT = random_probe(source.config.vocab_size, parsed.n_sequences, parsed.seq_len, parsed.probe_seed)
    model = source.load().to(device())
    found = intervene(model, probe_NT, parsed.kind, parsed.layer, parsed.position, doses, batch_size=parsed.batch_size)
    if parsed.json:
        print_json(dataclasses.asdict(found) | {"model": parsed.model, "importance": found.importance.tolist()})
    else:
        title = f"{parsed.model}: {found.kind} at block {found.layer}, position {found.position}"
        _print(found, title, Console())
    if out is not None:
        write_picture(found, parsed.model, out)
        Console(stderr=True).print(f"picture: {out}", highlight=False, soft_wrap=True, markup=False)
    return 0
