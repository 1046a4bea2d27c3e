"""`birthmark adapt`: train an adapter on a model that stays as it is, measured like any training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_file import config_of
from ...trainer.config_parser import Parser, add_run_fields
from . import pretrain

SUMMARY = "Train an adapter on a frozen model, with the snapshots of a training (docs/exchange.md)."

#: Peak learning rate where neither a config nor an option gives one. Adapters begin at nothing and take higher rates
#: than weights: LoRA's paper trains GPT-2 with 2e-4, peft's examples of prefixes take 1e-2.
_LR = 1e-3


def add_options(parser: Parser) -> None:
    """Add the options that name the model, or the run to resume, and those of all fields of a run."""
    parser.usage = "birthmark adapt MODEL --adapter.kind KIND [--config YAML] [--FIELD VALUE ...] | --resume RUN"
    parser.add_argument("--resume", type=str | None, metavar="RUN", help="Go on with the run in this folder.")
    add_run_fields(parser)
    parser.bare, parser.bare_kind = "init_from", "MODEL"


def expand(arguments: Sequence[str]) -> list[str]:
    """Add a learning rate if there is neither a config nor a rate.

    Raises:
        UsageError: no model to adapt is named.
    """
    words = list(arguments)
    named = {word.partition("=")[0] for word in words}
    if "--resume" in named or {"-h", "--help"} & named:
        return pretrain.expand(words)
    if "--init_from" not in named and "--config" not in named:
        raise UsageError("nothing to adapt: give a model first, as in birthmark adapt RUN --adapter.kind lora")
    return words if {"--config", "--optim", "--optim.lr"} & named else [f"--optim.lr={_LR!r}", *words]


def run(options: Namespace) -> int:
    """Train, then print the table of snapshots and write the report.

    Raises:
        UsageError: no adapter is named.
    """
    config = config_of(options)
    if not config.adapter.is_on:
        raise UsageError("adapter.kind is none: give --adapter.kind lora, prefix or prefix_plus")
    if options.config:
        name = Path(str(options.config[-1])).stem
    else:
        name = f"{Path(config.init_from.rpartition('@')[0] or config.init_from).name}-{config.adapter.kind}"
    return pretrain.train(config, options.resume, name)
