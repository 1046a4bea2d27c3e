"""What `birthmark fingerprint` and `birthmark identify` do with their options."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jsonargparse import Namespace
from rich.console import Console

from ...errors import UsageError
from ...measure.hidden_states import FingerprintProbe
from ...measure.records import RunDir
from ...metrics.config import LineageTestConfig
from ...metrics.seedprint import LEVEL
from ...report.pictures.saving import save_png
from ...report.terminal import bar, picture_path, print_json
from ...study.lineage.calibration import NULLS, calibrate, print_rates
from ...study.lineage.compare import Pair, check_comparable, choose_probe, compare_all, identify, seeds, short_names
from ...study.lineage.verdicts import describe_probe, print_pairs, print_ranking, told
from ...trainer.by_name.model_names import Native, Source, open_source
from ...trainer.config_file import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _test(parsed: Namespace) -> tuple[FingerprintProbe, LineageTestConfig]:
    """Probe, its length still to be chosen, and recipe."""
    fields = [field.name for field in dataclasses.fields(LineageTestConfig) if field.name != "null"]
    recipe = LineageTestConfig(null=parsed.null or "dimensions", **{name: parsed[name] for name in fields})
    if problems := recipe.problems():
        raise UsageError("; ".join(f"--{problem}" for problem in problems))
    return FingerprintProbe(kind=parsed.probe, n_inputs=parsed.n_inputs, probe_seed=parsed.probe_seed), recipe


def _save(figure: Figure, out: Path) -> None:
    save_png(figure, out)
    Console(stderr=True).print(f"picture: {out}", highlight=False, soft_wrap=True, markup=False)


def fingerprint(parsed: Namespace) -> int:
    """Compare models, or calibrate."""
    probe, recipe = _test(parsed)
    if parsed.calibrate is not None:
        return _calibrate(parsed, probe, recipe)
    if len(parsed.models) < 2:
        raise UsageError("give at least two models, or --calibrate CONFIG")
    drawn = len(parsed.models) > 2 or parsed.out is not None
    out = picture_path(parsed.out, "fingerprint.png", as_json=parsed.json) if drawn else None
    sources = [open_source(name) for name in parsed.models]
    check_comparable(sources, probe)
    probe = choose_probe(probe, parsed.seq_len, [source.config for source in sources])
    with bar("hidden states", len(sources), quiet=parsed.json) as advance:
        pairs = compare_all(sources, probe, recipe, Path(parsed.cache_dir), advance)
    if parsed.json:
        print_json(
            {
                "models": parsed.models,
                "probe": asdict(probe),
                "recipe": asdict(recipe),
                "pairs": [{"a": parsed.models[p.a], "b": parsed.models[p.b]} | told(p.found) for p in pairs],
            }
        )
    else:
        print_pairs(sources, pairs, describe_probe(probe, recipe), Console())
    if out is not None:
        _draw_matrix(sources, pairs, describe_probe(probe, recipe), out)
    return 0


def _draw_matrix(sources: list[Source], pairs: list[Pair], title: str, out: Path | None) -> None:
    from ...report.pictures.fingerprints import draw_matrix

    if out is None:
        return
    n = len(sources)
    z_MM, verdicts_MM = np.full((n, n), np.nan), np.full((n, n), "", dtype=object)
    for pair in pairs:
        for place in ((pair.a, pair.b), (pair.b, pair.a)):
            z_MM[place], verdicts_MM[place] = pair.found.z, pair.found.verdict
    _save(draw_matrix(short_names(sources), z_MM, verdicts_MM, title), out)


def _calibrate(parsed: Namespace, probe: FingerprintProbe, recipe: LineageTestConfig) -> int:
    from ...study.lineage.calibration_figure import rates

    if parsed.models:
        raise UsageError(f"--calibrate makes its own models: leave out {' '.join(parsed.models)}")
    for name in ("pairs", "kin_pairs"):
        if parsed[name] < 1:
            raise UsageError(f"--{name} {parsed[name]}: give at least 1")
    births = open_source(f"{parsed.calibrate}@0")
    kin = [pair for name in parsed.kin for pair in _with_birth(name)]
    sources = [births, *(source for pair in kin for source in pair)]
    check_comparable(sources, probe)
    probe = choose_probe(probe, parsed.seq_len, [source.config for source in sources])
    nulls = NULLS if parsed.null is None else (parsed.null,)
    n_kin = len(kin) or parsed.kin_pairs
    out = picture_path(parsed.out, "calibration.png", as_json=parsed.json)
    with bar("pairs", parsed.pairs + n_kin, quiet=parsed.json) as advance:
        found = calibrate(births.config, parsed.pairs, kin, n_kin, probe, recipe, nulls, advance)
    title = f"{Path(parsed.calibrate).name}, {probe.n_inputs} sequences of {probe.seq_len}, {probe.kind} probe"
    if parsed.json:
        print_json(
            {
                "config": parsed.calibrate,
                "level": LEVEL,
                "probe": asdict(probe),
                "recipe": {name: value for name, value in asdict(recipe).items() if name != "null"},
                "nulls": {r.null: {"strangers": r.strangers.told(), "kin": r.kin.told()} for r in found},
            }
        )
    else:
        print_rates(found, title, Console())
    if out is not None:
        _save(rates(found, LEVEL, title), out)
    return 0


def _with_birth(name: str) -> list[tuple[Source, Source]]:
    """A run's birth with each of its checkpoints."""
    run = RunDir.open(Path(name))
    steps = run.checkpoints_by_step()
    if not steps:
        raise UsageError(f"--kin {name}: has no checkpoint yet")
    return [(open_source(f"{name}@0"), open_source(f"{name}@{step}")) for step in steps]


def identification(parsed: Namespace) -> int:
    """Rank candidate seeds."""
    probe, recipe = _test(parsed)
    candidates = seeds(parsed.seeds)
    source = open_source(parsed.model)
    if parsed.config is None and not isinstance(source, Native):
        raise UsageError(f"{parsed.model} is no run of ours, and does not say how it was born: give --config CONFIG")
    config = source.config if parsed.config is None else resolve(Path(parsed.config)).model
    births = dataclasses.replace(source, name=parsed.config or parsed.model, config=config, tokenizer=None)
    check_comparable([source, births], probe)
    probe = choose_probe(probe, parsed.seq_len, [source.config, config])
    with bar("births", len(candidates), quiet=parsed.json) as advance:
        found = identify(source, config, candidates, probe, recipe, Path(parsed.cache_dir), advance)
    if parsed.json:
        print_json(
            {
                "model": parsed.model,
                "probe": asdict(probe),
                "recipe": asdict(recipe),
                "n_candidates": len(found),
                "best": found[0][0],
                "verdict": found[0][1].verdict,
                "seeds": [{"seed": seed} | told(result) for seed, result in found],
            }
        )
    else:
        print_ranking(found, f"{parsed.model}: {describe_probe(probe, recipe)}", Console())
    return 0
