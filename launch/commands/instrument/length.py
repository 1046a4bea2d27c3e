"""`birthmark length`: loss by position far beyond the training length, with and without the first keys."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from ....errors import RunError, UsageError
from ....schema import outside
from ....trainer.config_parser import Parser
from ...options import MODEL_NAMES, add_data, add_json, data_named

if TYPE_CHECKING:
    from rich.console import Console

    from ....measure.length.loss_by_position import LengthResult

SUMMARY = "Loss by position beyond the training length, and what evicting the first keys costs."


def add_options(parser: Parser) -> None:
    """Models, how far, which keys are gone, and the text."""
    parser.add_argument("models", type=str, nargs="+", metavar="MODEL", help=f"Each {MODEL_NAMES}.")
    parser.add_argument(
        "--to",
        type=str,
        default="8x",
        metavar="LENGTH",
        help="Positions to read: a number, or times the training length, such as 8x.",
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
        help="Positions that are read with all keys; by default the training length (max_seq_len).",
    )
    parser.add_argument(
        "--window",
        type=int | None,
        metavar="W",
        help="Behind the prefix the cache also holds no more than the first four keys (or as many as are evicted at "
        "most) and the last W; by default all.",
    )
    add_data(parser, "each run's own validation data")
    parser.add_argument("--n_sequences", type=int, default=32, metavar="N", help="Sequences to read.")
    parser.add_argument("--batch_size", type=int, default=8, metavar="B", help="Sequences at once.")
    parser.add_argument("--out", type=str | None, metavar="PNG", help="Picture; by default length.png.")
    add_json(parser)


def run(options: Namespace) -> int:
    """Read long sequences with every model and arm."""
    from rich.console import Console

    from ....report.pictures.long_sequences import write_picture
    from ....report.terminal import picture_path, print_json, print_written

    bounds = {"n_sequences": (2, 1 << 24), "batch_size": (1, 1 << 24)}
    bounds |= {name: (1, 1 << 27) for name in ("prefix", "window") if options[name] is not None}
    if problems := outside("", options, bounds):
        raise UsageError(f"--{problems[0]}")
    evict = _evict(options.evict)
    out = picture_path(options.out, "length.png", as_json=options.json)
    found = _results(options, evict)
    if options.json:
        print_json({"n_sequences": options.n_sequences, "models": [_as_json(result) for result in found]})
    else:
        _print(found, Console())
    if out is not None:
        write_picture(found, out)
        print_written("picture", out)
    return 0


def _evict(text: str) -> list[int]:
    """Numbers of keys, each once, rising."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise UsageError(f"--evict {text}: give whole numbers of keys with commas between, such as 0,1,4")
    return sorted({int(part) for part in text.split(",")})


def _length(text: str, trained: int) -> int:
    """Positions that ``--to`` asks for."""
    times = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(x?)", text)
    length = math.floor(float(times[1]) * (trained if times[2] else 1)) if times else 0
    if length < 2:
        raise UsageError(f"--to {text}: give positions, 2 or more, or times the training length, such as 8x")
    return length


def _results(options: Namespace, evict: list[int]) -> list[LengthResult]:
    from ....measure.length.loss_by_position import Arm, LengthResult, check_reach, evictions, loss_by_position
    from ....report.terminal import bar
    from ....trainer.by_name.model_names import open_source
    from ....trainer.by_name.own_text import held_out_tokens
    from ....trainer.devices import device

    sources = [(source, _length(options.to, source.config.max_seq_len)) for source in map(open_source, options.models)]
    for source, length in sources:
        # Before anything is loaded.
        check_reach(source.name, source.config.positions, source.config.max_seq_len, length)
        prefix = options.prefix or source.config.max_seq_len
        if prefix < max(evict):
            raise UsageError(f"--evict {max(evict)}: {source.name} reads a prefix of {prefix}; give no more")
    found = []
    total = sum(length for _, length in sources) * options.n_sequences * len(evict)
    with bar("positions", total, quiet=options.json) as advance:
        for source, length in sources:
            with data_named(options):
                tokens_NT = held_out_tokens(source, options.n_sequences, length + 1, options.data)
            model = source.load().to(device())
            prefix = options.prefix or source.config.max_seq_len
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
    from ....files import strict

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
    from ....report.terminal import Heading, print_table

    for result in found:
        window = "" if result.window is None else f", window {result.window}"
        ranges = [Heading(f"{start:,}–{stop - 1:,}") for start, stop in result.ranges]
        rows = []
        for arm in result.arms:
            cells = [f"{arm.between(*r)[0]:.3f}" for r in result.ranges]
            cost = result.cost(arm)
            rows.append([str(arm.evict), *cells, "–" if cost is None else "{:+.3f} ± {:.3f}".format(*cost)])
        title = f"{result.model}: prefix {result.prefix}{window}"
        print_table(console, [Heading("evicted", "name"), *ranges, Heading("cost")], rows, title=title)
        console.print()
    console.print(
        "mean loss in nats by range of positions; cost: what it is higher by behind the prefix than where every key "
        "stays, ± standard error over sequences",
        highlight=False,
        soft_wrap=True,
    )
