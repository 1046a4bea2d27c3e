"""`birthmark snapshot`: one measurement of a model of any kind, for people, as JSON or as a snapshot's folder."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.config import SnapshotConfig
from ...trainer.config_parser import Parser
from ..options import (
    add_data,
    add_json,
    add_model,
    add_probe,
    add_probe_kind,
    add_strangers,
    add_stream,
    add_trust,
    check_probe,
    check_probe_kind,
    check_strangers,
    check_stream,
    data_named,
    tell,
)

SUMMARY = "Measure the biases of a run, a birth or a model of transformers (docs/quantities.md)."


def add_options(parser: Parser) -> None:
    """Add the options for the model, the probe and the output."""
    add_model(parser)
    parser.add_argument(
        "--step",
        type=int | None,
        metavar="N",
        help="Take a run's checkpoint after N steps; for a model of transformers, the step that its snapshot names.",
    )
    add_probe_kind(
        parser,
        "text: on passages of text too, where sinks are often larger; by default a run's own text, or that of --data.",
    )
    add_data(parser, "the run's own validation text")
    add_probe(parser, SnapshotConfig.n_sequences, None)
    parser.add_argument(
        "--sink_epsilon",
        type=float,
        default=SnapshotConfig.sink_epsilon,
        help="Importance from which on a key is a sink.",
    )
    parser.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16", "float16", "float64"],
        default="float32",
        help="What the pass runs in.",
    )
    parser.add_argument(
        "--metrics",
        type=str,
        nargs="+",
        default=[],
        metavar="MODULE:CLASS",
        help="Your own metrics (docs/extending.md), from the working folder or installed.",
    )
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="The gradient of the loss too, by position, layer and module: on the text if there is one.",
    )
    parser.add_argument(
        "--controls",
        type=bool | None,
        help="Measure a few sequences with and without BOS too; by default where the tokenizer has a BOS, unless "
        "--stream.",
    )
    add_strangers(parser, 0)
    add_stream(parser)
    parser.add_argument("--out", type=str | None, metavar="DIR", help="New folder for all scalars and arrays.")
    add_trust(parser)
    add_json(parser)


def run(options: Namespace) -> int:
    """Measure one model."""
    import torch
    from rich.console import Console

    from ...models.by_block import Streaming
    from ...report.block_table import figures, print_snapshot
    from ...report.terminal import bar, print_json
    from ...trainer.by_name.loaded_model import (
        default_seq_len,
        load_named,
        measure_loaded,
        open_by_block,
        text_for,
        text_of_run,
    )
    from ...trainer.devices import device

    out = None if options.out is None else Path(options.out)
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists already; give a new folder")
    check_probe_kind(options)
    check_strangers(options)
    check_stream(options)
    name, label = _name_and_step(options.model, options.step)
    dtype, streaming, trust = getattr(torch, options.dtype), Streaming(options.scratch), options.trust_remote_code
    if options.stream:
        loaded = open_by_block(name, dtype, streaming)
    else:
        loaded = load_named(name, dtype, trust_remote_code=trust, tell=tell)
    if label is not None:
        loaded = dataclasses.replace(loaded, step=label)
    settings = SnapshotConfig(
        n_sequences=options.n_sequences,
        seq_len=default_seq_len(loaded) if options.seq_len is None else options.seq_len,
        batch_size=options.batch_size,
        sink_epsilon=options.sink_epsilon,
        metrics=options.metrics,
        gradients=options.gradients,
    )
    check_probe(settings, loaded.n_positions)
    text = None
    if options.probe == "text" or options.data is not None:
        with data_named(options):
            text = text_for(loaded, settings, options.data)
    elif options.probe is None:
        text = text_of_run(loaded, settings, tell)
    if not options.stream:
        loaded.model.to(device())
    found = measure_loaded(
        loaded,
        settings,
        options.probe_seed,
        text=text,
        n_strangers=options.strangers,
        controls=options.controls,
        progress=partial(bar, "blocks", quiet=options.json),
    )
    if out is not None:
        found.write(out)
    if options.json:
        print_json(figures(found))
    else:
        print_snapshot(found, Console())
    return 0


def _name_and_step(name: str, step: int | None) -> tuple[str, int | None]:
    """Return the model's name with a run's step in it, and the step to record for a model that has none itself."""
    from ...trainer.by_name.name_grammar import at_step, read_name

    if step is None:
        return name, None
    if step < 0:
        raise UsageError(f"--step {step}: give 0 or more")
    kind = read_name(name).kind
    if kind == "birth":
        raise UsageError(f"--step {step}: {name} says its step itself; leave one of them out")
    return (at_step(name, step), None) if kind == "run" else (name, step)
