"""`birthmark fingerprint`: which models share a birth, and how far the test can be trusted."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from ...errors import UsageError
from ...study.lineage.options import add_comparison_options
from ...trainer.config_parser import Parser
from ..options import MODEL_NAMES, add_json, add_strangers, add_stream, add_trust, check_strangers, check_stream, tell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...study.lineage.comparison import Comparison
    from ...trainer.by_name.model_names import ModelSource

SUMMARY = "Show which models share a birth (docs/lineage.md)."


def add_options(parser: Parser) -> None:
    """Add the options that name the models or a calibration, and those of the comparison."""
    parser.add_argument("models", type=str, nargs="*", metavar="MODEL", help=f"Each {MODEL_NAMES}.")
    parser.add_argument(
        "--out",
        type=str | None,
        metavar="FILE",
        help="A page (.html) or a picture (.png) to write; none by default.",
    )
    add_strangers(parser, 2)
    parser.add_argument(
        "--calibrate",
        type=str | None,
        metavar="CONFIG",
        help="Measure how often the nulls are wrong about births of this config.",
    )
    parser.add_argument(
        "--pairs", type=int, default=200, metavar="N", help="Pairs of strangers that --calibrate makes."
    )
    parser.add_argument(
        "--kin",
        type=str,
        nargs="+",
        default=[],
        metavar="RUN",
        help="Runs whose checkpoints are the kin of --calibrate; by default --kin_pairs births trained a little.",
    )
    parser.add_argument("--kin_pairs", type=int, default=20, metavar="N", help="See --kin.")
    add_comparison_options(parser, n_inputs=None)
    add_stream(parser)
    add_trust(parser)
    add_json(parser)


def run(options: Namespace) -> int:
    """Compare models, or calibrate."""
    from rich.console import Console

    from ...measure.hidden_states import FingerprintProbe
    from ...models.by_block import Streaming
    from ...report.terminal import bar, is_kind, out_file, print_json, print_written
    from ...study.lineage.answer import (
        answer_of_models,
        describe_test,
        fingerprint_json,
        print_pairs,
        short_names,
        write_kinship_page,
    )
    from ...study.lineage.comparison import (
        check_comparable,
        choose_probe,
        compare_models,
        comparison_of,
        default_inputs,
    )
    from ...trainer.by_name.loaded_model import birth_by_block, source_by_block
    from ...trainer.by_name.model_names import open_any_source

    asked = options.n_inputs
    if asked is None:
        options.n_inputs = FingerprintProbe.n_inputs
    comparison = comparison_of(options)
    check_stream(options)
    if options.calibrate is not None:
        if options.stream:
            raise UsageError("--stream: --calibrate makes small models of its own; leave one of them out")
        return _calibrate(options, comparison)
    if len(options.models) < 2:
        raise UsageError("give at least two models, or --calibrate CONFIG")
    check_strangers(options)
    out = None if options.out is None else out_file(options.out, "page", "picture")
    trust = options.trust_remote_code
    sources = [open_any_source(name, trust_remote_code=trust, tell=tell) for name in options.models]
    configs = [source.config for source in sources]
    if asked is None:
        comparison = replace(comparison, probe=replace(comparison.probe, n_inputs=default_inputs(configs)))
    check_comparable(sources, comparison.probe)
    probe = choose_probe(comparison.probe, comparison.seq_len, configs)
    cache_dir, n_strangers = Path(options.cache_dir), options.strangers
    if options.stream:
        streaming = Streaming(options.scratch)
        streamed = [source_by_block(source, streaming) for source in sources]
        n_blocks = sum(source.config.n_layers for source in [*sources, *sources[:1] * n_strangers])
        with bar("blocks", n_blocks, quiet=options.json) as streaming.advance:
            compared = compare_models(
                streamed,
                probe,
                comparison.recipe,
                cache_dir,
                n_strangers=n_strangers,
                new_birth=partial(birth_by_block, streaming=streaming),
            )
    else:
        with bar("hidden states", len(sources) + n_strangers, quiet=options.json) as advance:
            compared = compare_models(
                sources, probe, comparison.recipe, cache_dir, lambda n_inputs: advance(1), n_strangers
            )
    names, test = short_names(sources), describe_test(compared.probe, comparison.recipe)
    answer = answer_of_models(names, compared.pairs, compared.strangers)
    if out is not None and is_kind(out, "page"):
        write_kinship_page(out, names, compared, answer, test)
        print_written("page", out)
    elif out is not None:
        from ...report.pictures.several_models import draw_matrix

        _save(draw_matrix(names, [(p.a, p.b, p.fingerprint) for p in compared.pairs], test), out)
    if options.json:
        given = options.models
        print_json(
            {
                "sentence": answer,
                "models": given,
                "probe": None if comparison.recipe.null == "matched" else asdict(compared.probe),
                "recipe": asdict(comparison.recipe),
                "pairs": [{"a": given[p.a], "b": given[p.b]} | fingerprint_json(p.fingerprint) for p in compared.pairs],
                "strangers": [fingerprint_json(found) for found in compared.strangers],
            }
        )
    else:
        print_pairs(sources, compared, answer, test, Console())
    return 0


def _save(figure: Figure, out: Path) -> None:
    from ...report.pictures.saving import save_png
    from ...report.terminal import print_written

    save_png(figure, out)
    print_written("picture", out)


def _calibrate(options: Namespace, comparison: Comparison) -> int:
    from rich.console import Console

    from ...metrics.seedprint import LEVEL
    from ...report.terminal import bar, picture_path, print_json
    from ...study.lineage.answer import print_rates
    from ...study.lineage.calibration import NULLS, calibrate, draw_rates
    from ...study.lineage.comparison import RECIPE_FIELDS, check_comparable, choose_probe
    from ...trainer.by_name.model_names import open_source

    if options.models:
        raise UsageError(f"--calibrate makes its own models: leave out {' '.join(options.models)}")
    for name in ("pairs", "kin_pairs"):
        if options[name] < 1:
            raise UsageError(f"--{name} {options[name]}: give at least 1")
    births = open_source(f"{options.calibrate}@0")
    kin = [pair for name in options.kin for pair in _with_birth(name)]
    sources = [births, *(source for pair in kin for source in pair)]
    check_comparable(sources, comparison.probe)
    probe = choose_probe(comparison.probe, comparison.seq_len, [source.config for source in sources])
    nulls = NULLS if options.null is None else (options.null,)
    n_kin = len(kin) or options.kin_pairs
    out = picture_path(options.out)
    with bar("pairs", options.pairs + n_kin, quiet=options.json) as advance:
        probe, rates = calibrate(births.config, options.pairs, kin, n_kin, probe, comparison.recipe, nulls, advance)
    title = f"{Path(options.calibrate).name}, {probe.n_inputs} sequences of {probe.seq_len}, {probe.kind} probe"
    if options.json:
        print_json(
            {
                "config": options.calibrate,
                "level": LEVEL,
                "probe": asdict(probe),
                "recipe": {name: getattr(comparison.recipe, name) for name in RECIPE_FIELDS if name != "null"},
                "nulls": {r.null: {"strangers": r.strangers.as_json(), "kin": r.kin.as_json()} for r in rates},
            }
        )
    else:
        print_rates(rates, title, Console())
    if out is not None:
        _save(draw_rates(rates, LEVEL, title), out)
    return 0


def _with_birth(name: str) -> list[tuple[ModelSource, ModelSource]]:
    """Open every checkpoint of a run together with the run's birth."""
    from ...measure.records import RunDir
    from ...trainer.by_name.model_names import open_source
    from ...trainer.by_name.name_grammar import whole_run

    run = RunDir.open(whole_run(name, "kin are all checkpoints of a run").path)
    steps = run.checkpoints_by_step()
    if not steps:
        raise UsageError(f"--kin {name}: has no checkpoint yet; train it further")
    return [(open_source(f"{name}@0"), open_source(f"{name}@{step}")) for step in steps]
