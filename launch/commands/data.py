"""`birthmark data`: what a run reads, before it reads it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jsonargparse import Namespace
from rich.console import Console

from ...errors import UsageError
from ...trainer.config_parser import Parser
from ..options import add_config, add_json, config_with_overrides

SUMMARY = "Show what a run reads: its sources, how often each, samples in words, the batch of any step."

#: Samples that are shown where no step is asked for.
_N_SAMPLES = 10
#: Characters of a sample that a person reads, and of each document at least; --json has all of them.
_CHARS, _DOCUMENT_CHARS = 240, 40


def add_options(parser: Parser) -> None:
    """Add the options that name the run and one of its steps."""
    add_config(parser, without="list the sets that data.path knows by short names")
    parser.add_argument(
        "--step", type=int | None, metavar="N", help="Show the batch that optimizer step N trains on, from 1."
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Tokenise what is missing, and show the data; without a config, list the sets that have short names.

    Raises:
        UsageError: a config, or a step, that is impossible.
    """
    if options.config is None:
        if options.step is not None or options["set"]:
            raise UsageError("birthmark data: --step and --set are about a run; name its CONFIG")
        return _list_sets(options.json)

    from ...data.prepare import prepare
    from ...data.preview import BORDER, BOS, described, first_samples, source_facts, step_batch
    from ...report.terminal import print_json
    from ...trainer.initial_model import resolve_init_from

    config = resolve_init_from(config_with_overrides(options))
    sizes, max_steps, step = config.trainer.batch_sizes, config.trainer.max_steps, options.step
    if step is not None and not 1 <= step <= max_steps:
        raise UsageError(f"--step {step}: give 1 to trainer.max_steps ({max_steps})")
    data = prepare(config.data, vocab_size=config.model.vocab_size, seq_len=config.model.max_seq_len, batch_sizes=sizes)
    n_samples = sizes.before(max_steps)
    sources = source_facts(data, n_samples)
    tokens_BT = first_samples(data, sizes, _N_SAMPLES) if step is None else step_batch(data, sizes, step)
    samples = described(data, 0 if step is None else sizes.before(step - 1), tokens_BT)
    changes = []
    if data.mixture is not None:
        stages = zip(config.data.schedule, data.mixture.stages[1:], strict=True)
        changes = [{"step": change.step, "shares": stage.shares} for change, stage in stages]
    if options.json:
        for sample, ids in zip(samples, tokens_BT.tolist(), strict=True):
            sample["tokens"] = ids
        record = {
            "steps": max_steps,
            "tokens": n_samples * config.model.max_seq_len,
            "sources": sources,
            "changes": changes,
            "step": step,
            "samples": samples,
        }
        print_json(record)
        return 0
    console = Console()
    _print_sources(sources, changes, console)
    what = f"the first {len(samples)} samples" if step is None else f"the {len(samples)} samples of step {step:,}"
    console.print(
        f"\n[bold]{what}[/bold], of {data.train.seq_len:,} tokens and the next; {BORDER} ends a document, {BOS} is BOS"
    )
    for sample in samples:
        _print_sample(sample, console)
    return 0


def _list_sets(as_json: bool) -> int:
    from ...data.named_sets import SETS
    from ...report.terminal import print_json

    if as_json:
        print_json([{"name": name, **asdict(found)} for name, found in SETS.items()])
        return 0
    for name, found in SETS.items():
        configs = [f"{found.default or 'all'} (default)", *found.variants]
        print(f"{name}  {found.what}\n  hf:{found.repository}, column {found.column}, licence: {found.licence}")
        print(f"  configs: {', '.join(configs)}" if found.variants else "  one config")
    return 0


def _print_sources(sources: list[dict[str, Any]], changes: list[dict[str, Any]], console: Console) -> None:
    from ...report.table import Column, Table
    from ...report.terminal import say

    columns = (
        Column("source", "name"),
        Column("documents", format=",d"),
        Column("tokens", format=",d"),
        Column("bytes/token", format=".3g", key="bytes_per_token"),
        Column("share", format=".1%"),
        Column("tokens read", format=",d", key="tokens_read"),
        Column("epochs", format=".3g"),
    )
    Table.of(columns, [facts | {"source": facts["name"] or facts["kind"]} for facts in sources]).print(console)
    for change in changes:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in change["shares"].items() if share)
        say(console, f"after step {change['step']:,}: {shares}")


def _print_sample(sample: dict[str, Any], console: Console) -> None:
    from ...data.preview import BORDER
    from ...report.terminal import say

    place = f"sample {sample['sample']:,}  {sample['source']} {sample['number']:,}"
    if sample["epoch"] is not None:
        place += f"  epoch {sample['epoch'] + 1:,}"
    if borders := sample["borders"]:
        place += f"  documents end at {', '.join(map(str, borders))}"
    say(console, f"\n{place}", style="bold")
    # The text on both sides of every border is seen.
    pieces = sample["text"].split(BORDER)
    size = max(_CHARS // len(pieces), _DOCUMENT_CHARS)
    shown = BORDER.join(
        piece if len(piece) <= size else f"{piece[: size // 2]} … {piece[-size // 2 :]}" for piece in pieces
    )
    # Control characters, which a terminal would obey, are replaced.
    say(console, "".join(c if c.isprintable() or c in "\n\t" else "�" for c in shown), wrapped=True)
