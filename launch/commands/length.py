"""`birthmark length`: loss by position far beyond the training length, with and without the first keys."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from ...errors import RunError, UsageError
from ...schema import outside
from ...trainer.config_parser import Parser
from ..options import MODEL_NAMES, add_data, add_json, add_picture, data_named

if TYPE_CHECKING:
    from rich.console import Console

    from ...measure.loss_by_position import LengthResult
    from ...trainer.by_name.model_names import ModelSource

SUMMARY = "Loss by position beyond the training length, and what evicting the first keys costs."


def add_options(parser: Parser) -> None:
    """Add the options for the models, the length, the removed keys and the text."""
    parser.add_argument("models", type=str, nargs="+", metavar="MODEL", help=f"Each {MODEL_NAMES}.")
    parser.add_argument(
        "--to",
        type=str | None,
        metavar="LENGTH",
        help="Positions to read: a number, or times the training length, such as 8x; by default 8x, and 4,096 of a "
        "model that was trained on more than 512.",
    )
    parser.add_argument(
        "--evict",
        type=str,
        default="0,1,4",
        metavar="N,N",
        help="First keys that are gone from the cache once the prefix is read, one arm each; 0: none.",
    )
    parser.add_argument(
        "--prefix",
        type=int | None,
        metavar="T",
        help="Positions that are read with all keys; by default the training length (max_seq_len), or 512 where it is "
        "longer and --to is left out.",
    )
    parser.add_argument(
        "--window",
        type=int | None,
        metavar="W",
        help="Behind the prefix the cache also holds no more than the first four keys (or as many as are evicted at "
        "most) and the last W; by default all.",
    )
    add_data(parser, "each run's own validation data")
    parser.add_argument(
        "--n_sequences",
        type=int | None,
        metavar="N",
        help="Sequences to read; by default 32, and 8 of models that were trained on more than 512 positions.",
    )
    parser.add_argument("--batch_size", type=int, default=8, metavar="B", help="Sequences at once.")
    add_picture(parser)
    add_json(parser)


def run(options: Namespace) -> int:
    """Read long sequences with every model under every condition."""
    from rich.console import Console

    from ...report.pictures.single_commands import write_length
    from ...report.terminal import picture_path, print_json, print_picture

    bounds = {"n_sequences": (2, 1 << 24), "batch_size": (1, 1 << 24), "prefix": (1, 1 << 27), "window": (1, 1 << 27)}
    bounds = {name: bound for name, bound in bounds.items() if options[name] is not None}
    if problems := outside("", options, bounds):
        raise UsageError(f"--{problems[0]}")
    evict = _evict(options.evict)
    out = picture_path(options.out)
    found = _results(options, evict)
    if options.json:
        n_sequences = len(found[0].arms[0].losses_NT)
        print_json({"n_sequences": n_sequences, "models": [_as_json(result) for result in found]})
    else:
        _print(found, Console())
    if out is not None:
        write_length(found, out)
        print_picture(out)
    return 0


def _evict(text: str) -> list[int]:
    """Read the numbers of keys: each once, ascending."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise UsageError(f"--evict {text}: give whole numbers of keys with commas between, such as 0,1,4")
    return sorted({int(part) for part in text.split(",")})


def _length(text: str, trained: int) -> int:
    """Return the number of positions that ``--to`` asks for."""
    times = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(x?)", text)
    length = math.floor(float(times[1]) * (trained if times[2] else 1)) if times else 0
    if length < 2:
        raise UsageError(f"--to {text}: give positions, 2 or more, or times the training length, such as 8x")
    return length


#: Training length up to which all of it, eight times, is a first look that a CPU gives in a minute.
_FIRST_LOOK = 512


@dataclass(frozen=True)
class _Reading:
    """Lengths that one model is read to."""

    source: ModelSource
    prefix: int
    length: int

    @classmethod
    def of(cls, source: ModelSource, to: str | None, prefix: int | None) -> _Reading:
        """Return the lengths that the options ask for, and by default those of a first look."""
        trained = source.config.max_seq_len
        if to is not None or trained <= _FIRST_LOOK:
            return cls(source, prefix or trained, _length(to or "8x", trained))
        prefix = prefix or _FIRST_LOOK
        return cls(source, prefix, 8 * prefix)


def _results(options: Namespace, evict: list[int]) -> list[LengthResult]:
    from ...measure.loss_by_position import Arm, LengthResult, check_reach, evictions, loss_by_position
    from ...report.terminal import bar
    from ...trainer.by_name.model_names import open_source
    from ...trainer.by_name.texts_of_runs import held_out_tokens
    from ...trainer.devices import device

    readings = [_Reading.of(source, options.to, options.prefix) for source in map(open_source, options.models)]
    for reading in readings:
        # Before anything is loaded.
        source, config = reading.source, reading.source.config
        check_reach(source.name, config.positions, config.max_seq_len, reading.length)
        if reading.prefix < max(evict):
            raise UsageError(f"--evict {max(evict)}: {source.name} reads a prefix of {reading.prefix}; give no more")
    are_long = any(reading.source.config.max_seq_len > _FIRST_LOOK for reading in readings)
    n_sequences = options.n_sequences or (8 if are_long else 32)
    found = []
    total = sum(reading.length for reading in readings) * n_sequences * len(evict)
    with bar("positions", total, quiet=options.json) as advance:
        for reading in readings:
            source, prefix = reading.source, reading.prefix
            with data_named(options):
                tokens_NT = held_out_tokens(source, n_sequences, reading.length + 1, options.data)
            model = source.load().to(device())
            try:
                arms = [
                    Arm(n, loss_by_position(model, tokens_NT, eviction, batch_size=options.batch_size, advance=advance))
                    for n, eviction in evictions(evict, prefix, options.window).items()
                ]
            except (RunError, UsageError) as error:
                raise type(error)(f"{source.name}: {error}") from None
            found.append(LengthResult(source.name, prefix, options.window, arms))
    return found


def _as_json(result: LengthResult) -> dict[str, Any]:
    from ...files import strict

    arms = []
    for arm in result.arms:
        cost = result.cost(arm)
        arms.append(
            {
                "evict": arm.evict,
                "ranges": [
                    {"start": start, "stop": stop, "loss": loss, "error": error}
                    for (start, stop), (loss, error) in ((r, arm.between(*r)) for r in result.ranges)
                ],
                "cost": None if cost is None else {"loss": cost[0], "error": cost[1]},
                "loss_by_position": arm.by_position.tolist(),
            }
        )
    head = {"model": result.model, "length": result.length, "prefix": result.prefix, "window": result.window}
    return strict(head | {"arms": arms})


def _print(found: list[LengthResult], console: Console) -> None:
    from ...report.table import Column, Table
    from ...report.terminal import say

    for result in found:
        window = "" if result.window is None else f", window {result.window}"
        ranges = [Column(f"{start:,}–{stop - 1:,}", format=".3f") for start, stop in result.ranges]
        rows = []
        for arm in result.arms:
            losses = [arm.between(*r)[0] for r in result.ranges]
            cost = result.cost(arm)
            rows.append([arm.evict, *losses, cost and "{:+.3f} ± {:.3f}".format(*cost)])
        columns = [Column("evicted", "name"), *ranges, Column("cost")]
        Table(columns, rows).print(console, title=f"{result.model}: prefix {result.prefix}{window}")
        console.print()
    say(
        console,
        "mean loss in nats by range of positions; cost: what it is higher by behind the prefix than where no key is "
        "evicted, ± standard error over sequences",
    )
