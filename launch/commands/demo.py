"""`birthmark demo`: a tiny run, from birth to its page, in under a minute."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import count
from pathlib import Path

from jsonargparse import Namespace

from ...measure.records import RunDir
from ...trainer.config_file import read_config
from ...trainer.config_parser import Parser

SUMMARY = "Train a tiny model in under a minute: its page shows the seed's direction, a sink and the lineage test."

_CONFIG = "tiny_demo"

_BEFORE = """\
A model of one layer and one head learns a language in which some tokens must be copied (the bigram-backcopy task):
{steps} steps, under a minute on two cores. Nothing is downloaded or sent, and only {folder} is written.

Three marks of its birth are measured on the way:
  direction  at birth its hidden states lean to one side, which the seed decides (alignment; training turns them away)
  sink       the head learns to park its attention on the first token (sink mass on text)
  lineage    hidden states say which birth the model comes from (z of the lineage test; strangers stay near 0)
"""

_AFTER = """
open {page} in a browser. Next, which of two births is it from?
  birthmark fingerprint {run} {config}@0 {config}@1
the same birth without a sink, side by side:
  birthmark pretrain {config} --model.attention.aggregation headnorm --run_dir {twin}
  birthmark report {run} {twin} --out both.html
text instead of a task, for minutes; and what this machine can do:
  birthmark pretrain demo
  birthmark doctor
"""


def add_options(parser: Parser) -> None:
    """Add the option for the run's folder."""
    parser.add_argument(
        "--run_dir", type=str | None, metavar="DIR", help=f"By default runs/{_CONFIG}, or the next name that is free."
    )


def run(options: Namespace) -> int:
    """Announce the run, train, write the page, and suggest what to do next."""
    folder = Path(options.run_dir) if options.run_dir else _free_folder()
    config = dataclasses.replace(read_config(_CONFIG), run_dir=str(folder), name=folder.name)
    print(_BEFORE.format(steps=config.trainer.max_steps, folder=folder), flush=True)

    import torch

    from ...api.run import run_training
    from ...callbacks.stop import stopped_already
    from ...report.terminal import RunConsole, say
    from .pretrain import show_end

    # Tensors this small gain nothing from a second thread, which waits for the first where others use the cores too.
    torch.set_num_threads(1)
    console = RunConsole(RunDir(folder).metrics)
    config, outcome = run_training(config, resume=False, console=console, report=True)
    with stopped_already() if outcome.stopped_by else nullcontext():
        show_end(config, RunDir(folder), outcome, console)
    if outcome.stopped_by is None:
        page = RunDir(folder).report.absolute().as_uri()
        twin = folder.with_name(f"{folder.name}-headnorm")
        say(console, _AFTER.format(run=folder, page=page, config=_CONFIG, twin=twin))
    return 0


def _free_folder() -> Path:
    """Return the first of runs/NAME, runs/NAME-2, … that does not exist."""
    first = Path("runs") / _CONFIG
    names = (first if number == 1 else first.with_name(f"{_CONFIG}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
