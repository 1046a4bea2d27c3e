"""`birthmark quantise`: what a model loses under simulated low-bit arithmetic."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from ...errors import RunError, UsageError
from ...files import strict
from ...measure.config import SnapshotConfig
from ...trainer.config_parser import Parser
from ..options import add_data, add_json, add_model, add_picture, add_probe, check_probe, data_named

if TYPE_CHECKING:
    from rich.console import Console

    from ...measure.quantised.cost import QuantisedCost

SUMMARY = "Loss and token preference under simulated low-bit arithmetic (docs/evaluate.md)."


def add_options(parser: Parser) -> None:
    """Add the options for the model, the bits and the text to read."""
    add_model(parser)
    parser.add_argument(
        "--bits",
        type=str,
        default="w8a8,w4a16,w4a4",
        metavar="W8A8,…",
        help="Bits of weights and of activations: 2 to 8, or 16 for not rounded.",
    )
    add_data(parser, "a run's own validation text, else random tokens", "Text for the loss")
    add_probe(parser, 64, None)
    add_picture(parser)
    add_json(parser)


def run(options: Namespace) -> int:
    """Quantise one model in several ways."""
    from rich.console import Console

    from ...measure.quantised.cost import quantisation_costs
    from ...measure.quantised.rounding import read_bits
    from ...report.pictures.single_commands import write_quantisation
    from ...report.terminal import bar, picture_path, print_json, print_picture
    from ...trainer.by_name.loaded_model import TextProbe, default_seq_len, load_named, random_tokens, text_for
    from ...trainer.devices import device

    bits = read_bits(options.bits)
    out = picture_path(options.out)
    loaded = load_named(options.model)
    seq_len = default_seq_len(loaded) if options.seq_len is None else options.seq_len
    settings = SnapshotConfig(n_sequences=options.n_sequences, seq_len=seq_len, batch_size=options.batch_size)
    check_probe(settings, loaded.n_positions)
    random_NT = random_tokens(loaded, settings, options.probe_seed)
    of_text = options.data is not None or loaded.run is not None
    with data_named(options):
        text = text_for(loaded, settings, options.data) if of_text else TextProbe(random_NT)
    loaded.model.to(device())
    try:
        with bar("settings", len(bits) + 1, quiet=options.json) as advance:
            found = quantisation_costs(
                loaded.model,
                bits,
                text.tokens_NT,
                random_NT,
                documents_NT=text.documents_NT,
                batch_size=options.batch_size,
                advance=advance,
            )
    except (RunError, UsageError) as error:
        raise type(error)(f"{options.model}: {error}") from None
    about = {"model": options.model, "probe": "text" if of_text else "random"}
    about |= {"n_sequences": options.n_sequences, "seq_len": seq_len}
    if options.json:
        print_json(strict({**about, "settings": [dataclasses.asdict(cost) for cost in found]}))
    else:
        _print(found, options.model, of_text, Console())
    if out is not None:
        write_quantisation(found, options.model, out)
        print_picture(out)
    return 0


def _print(found: list[QuantisedCost], model: str, of_text: bool, console: Console) -> None:
    from ...report.table import Column, Table
    from ...report.terminal import say

    columns = (
        Column("bits", "name"),
        Column("loss", format=".4f"),
        Column("above", format="+.4f", key="increase"),
        Column("± se", format=".4f", key="increase_se"),
        Column("V·max p̄", format=".2f", key="preference_ratio"),
        Column("KL to\nuniform", format=".4f", key="kl_uniform"),
        Column("ρ of p̄", format=".4f", key="rank_correlation"),
    )
    first, *others = map(dataclasses.asdict, found)
    Table.of(columns, [first | {"increase": "", "increase_se": ""}, *others]).print(console, title=model)
    what = "text" if of_text else "random tokens, which cannot show what text would lose: give text, --data PATH"
    say(console, f"ρ is with p̄ of the first row; loss in nats per token, on {what}")
