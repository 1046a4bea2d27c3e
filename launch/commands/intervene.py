"""`birthmark intervene`: a model left alone and changed, as a sentence, tables and a picture."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.config import SnapshotConfig
from ...measure.intervention_kinds import KINDS, Around, Fill, Intervention, KindName
from ...trainer.config_parser import Parser
from ..options import add_data, add_json, add_model, add_picture, add_probe, check_probe, data_named, read_numbers

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ...measure.interventions import Intervened, PassFigures
    from ...report.table import Table
    from ...trainer.by_name.intervention_probe import ProbeName

#: No number of a block, a position, a unit, a channel or a head is larger.
_MOST = 1 << 27
SUMMARY = "Change positions, heads, hidden units or channels in some blocks; see which sinks form, and which go."

#: The beginning of a message about a wrong request → the option that it is about.
_OPTIONS = {
    name: f"--{name}"
    for name in ("kind", "layers", "positions", "lambda", "around", "matched", "units", "channels", "heads", "fill")
} | {"lambdas": "--lambda", "probe": "--probe", "text": "--data"}


def add_options(parser: Parser) -> None:
    """Add the options for the model, the kind, place and strength of the intervention, and the probe."""
    add_model(parser)
    parser.add_argument(
        "--kind",
        type=KindName,
        required=True,
        help="; ".join(f"{name}: {kind.meaning}" for name, kind in KINDS.items()) + ".",
    )
    parser.add_argument(
        "--layers",
        "--layer",
        type=str,
        required=True,
        metavar="L..L",
        help="Blocks, from 1, all of them changed at once: 3, 1..12, 1,4,7..9 or all.",
    )
    parser.add_argument(
        "--positions",
        "--position",
        type=str | None,
        metavar="K,K",
        help="Positions, from 0; units, channels and heads are ablated at every one where none is given.",
    )
    parser.add_argument(
        "--lambda", type=str | None, metavar="A,B", help="Doses of amplify and scale; by default 1,2,4,8."
    )
    parser.add_argument(
        "--around",
        type=Around | None,
        help="What amplify moves away from: the mean of heads' outputs over the probe (the default), or of values over "
        "random tokens.",
    )
    parser.add_argument(
        "--matched",
        action="store_true",
        help="With scale: let what heads aggregate grow in norm as amplify of the same dose would.",
    )
    parser.add_argument("--units", type=str | None, metavar="N,N", help="Hidden units of ablate_unit, from 0.")
    parser.add_argument("--channels", type=str | None, metavar="N,N", help="Channels of ablate_channel, from 0.")
    parser.add_argument("--heads", type=str | None, metavar="N,N", help="Query heads of ablate_head, from 0.")
    parser.add_argument("--fill", type=Fill | None, help="What an ablated thing becomes; by default zero.")
    parser.add_argument(
        "--probe",
        type=Literal["random", "bos", "text", "text_without_bos"] | None,
        help="What is read: random tokens, the same behind BOS, text, or text without BOS; by default text where "
        "--data is given, else random tokens.",
    )
    add_data(parser, "the run's own validation text")
    add_probe(parser, 64, 64)
    add_picture(parser)
    add_json(parser)


def run(options: Namespace) -> int:
    """Intervene on one model."""
    from rich.console import Console

    from ...findings.interventions import intervention_sentence
    from ...report.pictures.single_commands import write_intervention
    from ...report.terminal import bar, picture_path, print_json, print_picture
    from ...trainer.by_name.intervention_probe import check_probe_name, intervene_on
    from ...trainer.by_name.loaded_model import load_named
    from ...trainer.by_name.model_names import open_any_source
    from ...trainer.devices import device

    out = picture_path(options.out)
    probe: ProbeName = options.probe or ("random" if options.data is None else "text")
    settings = SnapshotConfig(n_sequences=options.n_sequences, seq_len=options.seq_len, batch_size=options.batch_size)
    source = open_any_source(options.model)
    check_probe(settings, source.config.position_limit)
    with _options_named(options):
        what = _intervention(options, source.config.n_layers)
        what.check(source.config, options.seq_len)
        check_probe_name(options.model, probe, options.data, source.tokenizer, getattr(source, "run", None))
    loaded = load_named(options.model)
    loaded.model.to(device())
    with bar("passes", 1 + len(what.doses), quiet=options.json) as advance, _options_named(options):
        found = intervene_on(
            loaded, what, settings, probe, text=options.data, probe_seed=options.probe_seed, advance=advance
        )
    if options.json:
        about = {"model": options.model, "probe": probe, "sentence": intervention_sentence(found)}
        print_json(_as_json(found, about))
    else:
        _print(found, options.model, probe, Console())
    if out is not None:
        write_intervention(found, options.model, probe, out)
        print_picture(out)
    return 0


@contextmanager
def _options_named(options: Namespace) -> Iterator[None]:
    """Name the option in messages about a wrong request: replace the field at the beginning of a UsageError from inside
    this context.
    """
    try:
        with data_named(options):
            yield
    except UsageError as error:
        field, rest = re.match(r"(\w*)(.*)", str(error), re.DOTALL).groups()  # type: ignore[union-attr]
        named = field in _OPTIONS and rest[:1] in (" ", ":") and not str(error).startswith("text probe")
        raise UsageError(_OPTIONS[field] + rest if named else str(error)) from None


def _intervention(options: Namespace, n_layers: int) -> Intervention:
    """Read the intervention from the options; it is not checked yet."""
    given = {name: _numbers(name, options[name]) for name in ("positions", "units", "channels", "heads")}
    layers = tuple(range(1, n_layers + 1)) if options.layers == "all" else _numbers("layers", options.layers)
    lambdas = _lambdas(options["lambda"])
    return Intervention(
        options.kind,
        layers,
        lambdas=lambdas,
        around=options.around,
        matched=options.matched,
        fill=options.fill,
        **given,
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()

    def check(last: int, count: int) -> None:
        if last > _MOST:
            raise UsageError(f"--{option} {text}: no model has so many; give smaller numbers")

    return tuple(sorted(read_numbers(option, text, "20, 1..12 or 1,4,7..9", check)))


def _lambdas(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        doses = tuple(float(part) for part in text.split(","))
    except ValueError:
        doses = (math.nan,)
    if not all(map(math.isfinite, doses)):
        raise UsageError(f"--lambda {text}: give numbers with commas between, such as 1,2,4,8")
    return doses


def _as_json(found: Intervened, about: dict[str, Any]) -> dict[str, Any]:
    """Return all figures for JSON: every array as it is, the losses as means with standard errors."""
    from ...files import strict

    passes = []
    for number, figures in enumerate(found.passes):
        losses = {"loss": found.loss(number), "loss_increase": found.loss_increase(number)}
        arrays = {name: value.tolist() for name, value in vars(figures).items() if name not in ("dose", "losses")}
        passes.append({"dose": figures.dose, **arrays, **losses})
    sizes = {"n_sequences": found.n_sequences, "seq_len": found.seq_len}
    what = dataclasses.asdict(found.what) | {"lambdas": found.what.doses}
    return strict({**about, **what, **sizes, "keys": found.keys, "uniform": found.uniform.tolist(), "passes": passes})


def _print(found: Intervened, model: str, probe: str, console: Console) -> None:
    """Print a sentence, a row for every dose, and a row for every block at the strongest one; all fit 80 columns."""
    from ...findings.interventions import dose_in_words, intervention_in_words, intervention_sentence, strongest_pass
    from ...report.terminal import say

    say(console, f"{model}: {intervention_in_words(found.what)}", wrapped=True)
    say(console, f"{intervention_sentence(found)}\n", wrapped=True)
    _by_dose(found).print(console)
    number = strongest_pass(found)
    for i, key in enumerate(found.keys):
        _by_block(found, number, i).print(console)
        changed = dose_in_words(found, number)
        attended = f"key {key}: attention of later queries to it, mean over heads, left alone → {changed}"
        say(console, f"block: * is changed; {attended}", wrapped=True)
        uniform = f"uniform attention gives {found.uniform[i]:.3f}"
        say(console, f"{uniform}; norm and largest channel are of the state at {key}\n", wrapped=True)
    say(console, f"{found.n_sequences} × {found.seq_len} tokens of probe {probe}", wrapped=True)


def _mean(x: np.ndarray) -> float:
    """Average the finite values; NaN if there are none."""
    import numpy as np

    return float(np.nanmean(x)) if np.isfinite(x).any() else math.nan


def _by_dose(found: Intervened) -> Table:
    from ...findings.interventions import dose_in_words
    from ...report.table import Column, Table

    several, beside_first = len(found.keys) > 1, found.keys != (0,)
    of_outputs, has_loss = found.what.means.place == "aggregation", found.loss(0) is not None
    columns = [Column("", "text")]
    columns += [Column("key")] * several + [Column("to key" if several else f"to key {found.keys[0]}", format=".3f")]
    columns += [Column("to key 0", format=".3f")] * beside_first
    columns += [Column("output ×", format=".3g")] * of_outputs
    columns += [Column("largest\nnorm", format=",.0f")]
    columns += [Column("loss", format=".4f"), Column("above", format="+.4f"), Column("± se", format=".4f")] * has_loss
    rows = []
    for number, figures in enumerate(found.passes):
        for i, key in enumerate(found.keys):
            cells: list[object] = [dose_in_words(found, number) if i == 0 else "", *([key] * several)]
            cells.append(_mean(figures.attention[..., i]))
            cells += [_mean(figures.attention_to_first[..., i])] * beside_first
            if of_outputs:
                cells.append(_mean(figures.norm_after[:, i] / figures.norm_before[:, i]))
            cells.append(figures.state_norm[:, i].max())
            loss, increase = found.loss(number), found.loss_increase(number)
            if loss is not None and increase is not None:
                above = increase if number else ("", "")
                cells += [loss[0], *above] if i == 0 else [""] * 3
            rows.append(cells)
    return Table(columns, rows)


def _by_block(found: Intervened, number: int, i: int) -> Table:
    """Build the table of one key by block, without and with the intervention."""
    from ...findings.formatting import format_value
    from ...report.table import Column, Table

    key, alone, changed = found.keys[i], found.passes[0], found.passes[number]

    def moved(name: str, block: int | slice) -> str:
        before, after = (_mean(getattr(figures, name)[block, ..., i]) for figures in (alone, changed))
        return f"{format_value(before, '.3f')} → {format_value(after, '.3f')}"

    def attention(block: int | slice) -> list[str]:
        return [moved(name, block) for name in ("attention", *(["attention_to_first"] if key else []))]

    n_blocks, rows = len(changed.state_norm), []
    for block in range(n_blocks):
        mark = "*" if block + 1 in found.what.layers else " "
        norms = " → ".join(f"{figures.state_norm[block, i]:,.0f}" for figures in (alone, changed))
        rows.append([f"{block + 1}{mark}", *attention(block), norms, _channel(changed, block, i)])
    rows.append(["mean ", *attention(slice(None)), "", ""])
    if (first := min(found.what.layers)) < n_blocks and first > 1:
        rows.append([f"after {first} ", *attention(slice(first, None)), "", ""])
    titles = ("block", f"key {key}", *(["key 0"] if key else []), "norm", "largest channel")
    return Table(list(map(Column, titles)), rows, gaps={n_blocks})


def _channel(figures: PassFigures, block: int, i: int) -> str:
    value = figures.channel_value[block, i]
    return f"{figures.channel[block, i]}: {value:,.{0 if abs(value) >= 100 else 1}f}"
