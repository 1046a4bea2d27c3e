"""`birthmark pretrain`: train a model, with a snapshot at birth and at every checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from ...data.config import is_remote
from ...errors import UsageError
from ...measure.records import RunDir
from ...trainer.config_file import config_of
from ...trainer.config_parser import Parser, add_run_fields

if TYPE_CHECKING:
    from rich.console import Console

    from ...trainer.config import RunConfig
    from ...trainer.run import Outcome

SUMMARY = "Train a model and snapshot its biases at birth and at every checkpoint."


def add_options(parser: Parser) -> None:
    """Add the options that name a config or a run to resume, and those of all fields of a run."""
    parser.usage = "birthmark pretrain [CONFIG | --resume RUN] [--FIELD VALUE ...]"
    parser.add_argument("--resume", type=str | None, metavar="RUN", help="Go on with the run in this folder.")
    add_run_fields(parser)


#: Fields that say where a run is written, and nothing about the run itself.
_WHERE = ("name", "run_dir")


def expand(arguments: Sequence[str]) -> list[str]:
    """Put the run's own config before the words of ``--resume RUN``, so that the fields that follow override it.

    Raises:
        UsageError: neither a config nor a run is named.
    """
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _WHERE:
        where.add_argument(f"--{name}", nargs="?")
    where.add_argument("--debug", action="store_true")
    if not where.parse_known_args(arguments)[1]:
        raise UsageError(
            "nothing to train: give --config NAME (birthmark configs lists them) or fields of your own, or start with "
            "birthmark demo"
        )
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # A value that is missing is the real parser's to refuse.
    words.add_argument("--resume", nargs="?")
    for name in ("run_dir", "config", "init_from", "optim", "optim.lr"):
        words.add_argument(f"--{name}", nargs="?")
    given, _ = words.parse_known_args(arguments)
    if given.resume is None:
        return _with_rate(arguments, {name: value for name, value in vars(given).items() if value is not None})
    if given.config is not None:
        raise UsageError("--resume takes the config of the run itself: leave --config out, override single fields")
    from ...trainer.by_name.name_grammar import whole_run

    if is_remote(given.resume):
        from ...trainer.checkpoints.stored_run import resumed_here

        here = str(resumed_here(given.resume, given.run_dir))
        # The last one holds.
        arguments, given.resume = [*arguments, f"--resume={here}"], here
    run = whole_run(given.resume, "a run goes on from its last checkpoint, and --init_from begins a new one")
    return [f"--config={RunDir.open(run.path).config}", *arguments]


def _with_rate(arguments: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Add a learning rate that fits the initial model, if the arguments have neither a config nor a rate."""
    if "init_from" not in given or {"config", "optim", "optim.lr"} & given.keys():
        return list(arguments)
    from ...trainer.lr_schedule import continued_rate

    return [f"--optim.lr={continued_rate(given['init_from']).lr!r}", *arguments]


def run(options: Namespace) -> int:
    """Train, then print the table of snapshots and write the report."""
    return train(config_of(options), options.resume, _name_of(options))


def train(config: RunConfig, resumed: str | None, name: str) -> int:
    """Train as `run` does, for a command that has read its config.

    Args:
        config: the run to train.
        resumed: the run to continue; None for a new one, or one that a launcher has started again.
        name: name of the run, if its config has none.
    """
    from ...api.run import in_its_folder, run_training
    from ...callbacks.stop import stopped_already
    from ...report.terminal import RunConsole
    from ...trainer.processes.launched_process import launched_process

    if resumed is not None:
        config = dataclasses.replace(config, run_dir=str(RunDir(Path(resumed)).path))
    config = in_its_folder(config, name)
    run_dir = RunDir(Path(config.run_dir))
    console = RunConsole(run_dir.metrics)
    where = launched_process()
    resume = resumed is not None or (RunDir.is_run(run_dir.path) and _is_repeated(config, run_dir))
    config, outcome = run_training(config, resume=resume, console=console, report=True)
    if where is not None and where.rank > 0:
        return 0
    with stopped_already() if outcome.stopped_by else nullcontext():
        show_end(config, run_dir, outcome, console)
    return 0


def _is_repeated(config: RunConfig, run: RunDir) -> bool:
    """Say if a launcher has repeated the command that began ``run``, in order to continue it."""
    from ...trainer.initial_model import resolve_init_from
    from ...trainer.processes.launched_process import restarted, restarts_are_counted
    from ...trainer.saved_config import config_differences

    if restarted() or restarts_are_counted():
        return restarted()
    return not config_differences(resolve_init_from(config), run)


def show_end(config: RunConfig, run: RunDir, outcome: Outcome, console: Console) -> None:
    """Show the results at a run's end: the table of its snapshots, and where its report is."""
    from ...report.snapshot_table import print_table
    from ...report.terminal import say

    if config.snapshot.enabled:
        print_table(run, console)
    if outcome.report is not None:
        say(console, f"report: {outcome.report}")
    if outcome.stopped_by:
        say(
            console,
            f"stopped by {outcome.stopped_by} at step {outcome.step} of {config.trainer.max_steps}; "
            f"go on with: birthmark pretrain --resume {run.path}",
        )


def _name_of(options: Namespace) -> str:
    """Return the name for a run whose config gives none: that of its config file."""
    return Path(str(options.config[-1])).stem if options.config else "run"
