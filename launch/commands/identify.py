"""`birthmark identify`: which seed a model was born from."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...study.lineage.options import add_comparison_options
from ...trainer.config_file import read_config
from ...trainer.config_parser import Parser
from ..options import add_json, add_model, add_stream, add_trust, check_seed, check_stream, read_numbers, tell

SUMMARY = "Show which seed a model was born from (docs/lineage.md)."


def add_options(parser: Parser) -> None:
    """Add the options that name the model and the candidates, and those of the comparison."""
    add_model(parser)
    parser.add_argument("--seeds", type=str, required=True, metavar="A..B", help="Candidates: 0..9999, or 3,7,10..20.")
    parser.add_argument(
        "--config", type=str | None, metavar="CONFIG", help="YAML file of the births; by default the run's own."
    )
    parser.add_argument("--out", type=str | None, metavar="HTML", help="A page of all candidates.")
    add_comparison_options(parser, n_inputs=500)
    add_stream(parser)
    add_trust(parser)
    add_json(parser)


#: Seeds of one command: at a second each they take more than a week.
_MOST = 1_000_000


def read_seeds(text: str) -> list[int]:
    """Read seeds from ``0..9999`` (both ends included), ``7`` and commas between such; a UsageError names a part that
    is neither.
    """

    def check(last: int, n_seeds: int) -> None:
        check_seed("seeds", last)
        if n_seeds > _MOST:
            raise UsageError(f"--seeds {text}: more than {_MOST:,} births; give fewer")

    return read_numbers("seeds", text, "0..9999 or 3,7,10..20", check)


def run(options: Namespace) -> int:
    """Rank candidate seeds."""
    from rich.console import Console

    from ...models.by_block import Streaming
    from ...report.terminal import bar, out_file, print_json, print_written
    from ...study.lineage.answer import (
        answer_of_seeds,
        describe_test,
        fingerprint_json,
        print_ranking,
        write_seeds_page,
    )
    from ...study.lineage.comparison import check_comparable, choose_probe, comparison_of, rank_seeds
    from ...trainer.by_name.loaded_model import birth_by_block, source_by_block
    from ...trainer.by_name.model_names import AnySource, ModelSource, SourceWithBirth, open_any_source

    comparison = comparison_of(options)
    check_stream(options)
    page = None if options.out is None else out_file(options.out, "page")
    candidates = read_seeds(options.seeds)
    source = open_any_source(options.model, trust_remote_code=options.trust_remote_code, tell=tell)
    if options.config is None and not isinstance(source, SourceWithBirth):
        raise UsageError(f"{options.model} is no run of Birthmark, and its config is unknown: give --config CONFIG")
    known = source.config if isinstance(source, ModelSource) else None
    config = read_config(Path(options.config)).model if known is None or options.config is not None else known
    births = AnySource(options.config or options.model, config, source.load, None)
    check_comparable([source, births], comparison.probe)
    probe = choose_probe(comparison.probe, comparison.seq_len, [source.config, config])
    recipe, cache_dir = comparison.recipe, Path(options.cache_dir)
    if options.stream:
        streaming = Streaming(options.scratch)
        streamed, new_birth = source_by_block(source, streaming), partial(birth_by_block, streaming=streaming)
        n_blocks = source.config.n_layers + len(candidates) * config.n_layers
        with bar("blocks", n_blocks, quiet=options.json) as streaming.advance:
            probe, ranked = rank_seeds(streamed, config, candidates, probe, recipe, cache_dir, new_birth=new_birth)
    else:
        with bar("births", len(candidates), quiet=options.json) as advance:
            probe, ranked = rank_seeds(source, config, candidates, probe, recipe, cache_dir, advance)
    answer, test = answer_of_seeds(options.model, ranked), describe_test(probe, comparison.recipe)
    if page is not None:
        write_seeds_page(page, options.model, ranked, answer, test)
        print_written("page", page)
    if options.json:
        print_json(
            {
                "sentence": answer,
                "model": options.model,
                "probe": None if comparison.recipe.null == "matched" else dataclasses.asdict(probe),
                "recipe": dataclasses.asdict(comparison.recipe),
                "n_candidates": len(ranked),
                "best": ranked[0][0],
                "verdict": ranked[0][1].verdict,
                "seeds": [{"seed": seed} | fingerprint_json(result) for seed, result in ranked],
            }
        )
    else:
        print_ranking(ranked, answer, test, Console())
    return 0
