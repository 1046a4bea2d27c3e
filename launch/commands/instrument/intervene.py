"""`birthmark intervene`: the dose-response table and picture of one intervention."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from ....errors import RunError, UsageError
from ....measure.config import SnapshotConfig
from ....measure.intervention_kinds import MEANINGS, Kind
from ....trainer.config_parser import Parser
from ...options import add_json, add_model, add_probe, check_probe

if TYPE_CHECKING:
    from rich.console import Console

    from ....measure.interventions import DoseResponse

SUMMARY = "Change one position in one block, and see whether a sink forms there later."


def add_options(parser: Parser) -> None:
    """The model, what is changed where and how much, and the probe."""
    add_model(parser)
    parser.add_argument(
        "--kind",
        type=Kind,
        required=True,
        help="; ".join(f"{kind}: {meaning}" for kind, meaning in MEANINGS.items()) + ".",
    )
    parser.add_argument("--layer", type=int, required=True, metavar="L", help="Block, from 1.")
    parser.add_argument("--position", type=int, required=True, metavar="K", help="Position, from 0.")
    parser.add_argument("--lambda", type=str, default="1,2,4,8", metavar="A,B", help="Doses; a mask has none.")
    add_probe(parser, 64, 64)
    parser.add_argument("--out", type=str | None, metavar="PNG", help="Picture; by default intervene.png.")
    add_json(parser)


def run(options: Namespace) -> int:
    """Intervene on one model."""
    from rich.console import Console

    from ....data.probes import random_probe
    from ....measure.interventions import check, intervene
    from ....report.pictures.dose_response import write_picture
    from ....report.terminal import picture_path, print_json, print_written
    from ....trainer.by_name.model_names import open_source
    from ....trainer.devices import device

    doses = _lambdas(options["lambda"])
    out = picture_path(options.out, "intervene.png", as_json=options.json)
    source = open_source(options.model)
    settings = SnapshotConfig(n_sequences=options.n_sequences, seq_len=options.seq_len, batch_size=options.batch_size)
    check_probe(settings, source.config.position_limit)
    try:
        check(source.config, options.kind, options.layer, options.position, options.seq_len, doses)
    except UsageError as error:
        raise UsageError(f"--{error}") from None
    probe_NT = random_probe(source.config.vocab_size, options.n_sequences, options.seq_len, options.probe_seed)
    model = source.load().to(device())
    try:
        found = intervene(
            model, probe_NT, options.kind, options.layer, options.position, doses, batch_size=options.batch_size
        )
    except RunError as error:
        raise RunError(f"{options.model}: {error}") from None
    if options.json:
        print_json(dataclasses.asdict(found) | {"model": options.model, "importance": found.importance.tolist()})
    else:
        title = f"{options.model}: {found.kind} at block {found.layer}, position {found.position}"
        _print(found, title, Console())
    if out is not None:
        write_picture(found, options.model, out)
        print_written("picture", out)
    return 0


def _lambdas(text: str) -> list[float]:
    try:
        doses = [float(part) for part in text.split(",")]
    except ValueError:
        doses = [math.nan]
    if not all(map(math.isfinite, doses)):
        raise UsageError(f"--lambda {text}: give numbers with commas between, such as 1,2,4,8")
    return doses


def _print(found: DoseResponse, title: str, console: Console) -> None:
    from rich import box
    from rich.table import Table

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
