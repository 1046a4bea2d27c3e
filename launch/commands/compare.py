"""`birthmark compare`: how alike models are inside, in what they predict, and on the line between their weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.config import SnapshotConfig
from ...trainer.config_parser import Parser
from ..options import (
    MODEL_NAMES,
    add_data,
    add_json,
    add_probe,
    add_probe_kind,
    check_probe,
    check_probe_kind,
    data_named,
)

SUMMARY = "Compare models: states of all layers, predictions, and the loss between their weights."


def add_options(parser: Parser) -> None:
    """Add the options for the models, the probe and the output."""
    parser.add_argument("models", type=str, nargs="+", metavar="MODEL", help=f"Each {MODEL_NAMES}.")
    parser.add_argument(
        "--step",
        type=str | None,
        metavar="N,N|all",
        help="Compare runs after each of these steps, or the checkpoints of one run with one another.",
    )
    add_probe_kind(
        parser, "What they are shown; by default text where --data or --barrier is given, else random tokens."
    )
    add_data(parser, "the first run's own validation text")
    add_probe(parser, SnapshotConfig.n_sequences, None)
    parser.add_argument(
        "--minibatch",
        type=int,
        default=256,
        metavar="N",
        help="Sequences whose states CKA compares at a time; it is the mean over such minibatches.",
    )
    parser.add_argument(
        "--barrier",
        type=int | None,
        metavar="POINTS",
        help="Also the loss at so many points on the straight line between the weights of every pair, such as 11.",
    )
    parser.add_argument(
        "--out",
        type=str | None,
        metavar="DIR|PNG",
        help="New folder for all pictures and numbers, or a picture with its numbers; none by default.",
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Compare models."""
    from rich.console import Console

    from ...report.compared_models import as_json, print_compared, write_folder, write_picture
    from ...report.terminal import bar, picture_path, print_json, print_picture, print_written
    from ...trainer.by_name.comparison import Comparer, names_at_steps

    settings = _settings(options)
    folder = None if options.out is None or Path(options.out).suffix else Path(options.out)
    if folder is not None and folder.exists():
        raise UsageError(f"--out {folder}: exists already; give a new folder")
    picture = picture_path(options.out) if folder is None else None
    groups: dict[int | None, list[str]] = {None: options.models}
    of_one_run: list[int] | None = None
    if options.step is not None:
        at_steps = names_at_steps(options.models, options.step)
        if len(options.models) > 1:
            groups = dict(at_steps.items())
        else:
            of_one_run = list(at_steps)
            groups = {None: [name for names in at_steps.values() for name in names]}
    n = len(next(iter(groups.values())))
    if n < 2:
        raise UsageError("give at least two models, or one run with --step all")
    text = options.probe == "text" or options.data is not None or options.barrier is not None
    comparer = Comparer(settings, options.seq_len, options.minibatch, text=text, data=options.data)
    n_points = (options.barrier or 0) * n * (n - 1) // 2
    found = []
    with data_named(options), bar("passes", len(groups) * (n + 1 + n_points), quiet=options.json) as advance:
        for step, names in groups.items():
            found.append(comparer.compared(names, options.barrier, step, advance))
    shape = comparer.tokens_NT.shape
    probe = {"kind": "text" if text else "random", "n_sequences": shape[0], "seq_len": shape[1]}
    probe |= {"minibatch": options.minibatch} | ({} if text else {"probe_seed": options.probe_seed})
    answer = as_json(found, probe)
    if options.json:
        print_json(answer)
    else:
        print_compared(found, probe, Console())
    if folder is not None:
        write_folder(folder, found, answer, of_one_run)
        print_written("pictures and numbers", folder)
    elif picture is not None:
        write_picture(picture, found)
        print_picture(picture)
    return 0


def _settings(options: Namespace) -> SnapshotConfig:
    """Return the settings of the probe, after checking that the options agree with one another."""
    from ...trainer.by_name.comparison import comparison_problems

    check_probe_kind(options)
    if options.barrier is not None and options.probe == "random":
        raise UsageError(f"--barrier {options.barrier}: a loss needs text; leave --probe random out")
    settings = SnapshotConfig(n_sequences=options.n_sequences, batch_size=options.batch_size)
    settings = dataclasses.replace(settings, probe_seed=options.probe_seed)
    check_probe(settings, None)
    if problems := comparison_problems(options.n_sequences, options.minibatch, options.barrier):
        raise UsageError("; ".join(f"--{problem}" for problem in problems))
    return settings
