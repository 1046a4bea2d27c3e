"""The mark of birth from 60M to 8B parameters: births of published shapes, measured a block at a time.

    python research/birth_over_scale/study.py --folder FOLDER [--most 1.0] [--only NAME,NAME] [--seeds 0,1,2]

Every row is ``birthmark snapshot SHAPE@SEED --stream``, whose folder stays in FOLDER: after an interrupt what is there
is not done again, and what is not asked for is named as not run. Out of all that is there it writes
``results.json`` and ``results.md`` beside it, and with ``--figure PNG`` a picture. ``--most``: shapes of up
to so many billions of parameters are run, small ones first; 0 runs nothing and writes what is there.

Twins are one shape with three MLPs of about as many parameters: SwiGLU, and GELU and ReLU one and a half times as wide.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from birthmark.launch.cli import main as birthmark
from birthmark.measure.records import Snapshot
from birthmark.metrics.rankings import spearman
from birthmark.models.config import ModelConfig
from birthmark.models.parameter_shapes import parameter_shapes
from birthmark.trainer.by_name.shipped_configs import find_config, shipped_configs
from birthmark.trainer.config_file import read_config

RESULTS = Path(__file__).with_name("results")
N_SEQUENCES, SEQ_LEN = 32, 16
#: Shapes whose twins are measured: one that comes with no config, and two that do.
_SMALL = ModelConfig(d_model=256, n_layers=6, n_heads=4, vocab_size=32000, max_seq_len=256, mlp="swiglu")
_TWINS = {"small": replace(_SMALL, init=replace(_SMALL.init, kind="normal", std=0.02))}
_TWINS_OF = ("llama-160m", "tinyllama-1.1b")
#: Parameters at which the picture has ticks.
_TICKS = [n * 10**6 for n in (20, 100, 500, 2000, 10000)]


class Shape(NamedTuple):
    """A model whose births are measured."""

    name: str
    config: ModelConfig
    source: str
    """Name of the model for `birthmark snapshot`."""
    twin_of: str = ""

    @property
    def n_params(self) -> int:
        """Number of parameters, embedding tables included."""
        return sum(prod(shape) for _, shape in parameter_shapes(self.config))


def shapes(folder: Path) -> list[Shape]:
    """Return all shapes, small ones first."""
    found = [
        Shape(name := shipped.name.removeprefix("models/"), read_config(find_config(name)).model, name)
        for shipped in shipped_configs()
        if shipped.kind == "model"
    ]
    bases = _TWINS | {shape.name: shape.config for shape in found if shape.name in _TWINS_OF}
    for base, config in bases.items():
        for mlp in ("swiglu", "gelu", "relu"):
            if mlp == "swiglu" and base not in _TWINS:
                continue  # the shape itself
            width = config.ff if mlp == "swiglu" else config.ff * 3 // 2
            twin = replace(config, mlp=mlp, d_ff=width)
            file = folder / f"{base}-{mlp}.yaml"
            file.write_text(yaml.safe_dump({"model": asdict(twin)}))
            found.append(Shape(f"{base}-{mlp}", twin, str(file), base))
    return sorted(found, key=lambda shape: shape.n_params)


def run(shape: Shape, seed: int, folder: Path) -> None:
    """Measure a birth, unless its snapshot exists."""
    out = folder / f"{shape.name}@{seed}"
    if out.exists():
        return
    start = time.perf_counter()
    probe = [f"--n_sequences={N_SEQUENCES}", f"--seq_len={SEQ_LEN}", f"--batch_size={N_SEQUENCES}"]
    status = birthmark(["snapshot", f"{shape.source}@{seed}", "--stream", *probe, f"--out={out}"])
    print(f"{out.name}: {time.perf_counter() - start:.1f} s, status {status}", flush=True)


def _between(snapshots: Mapping[int, Snapshot]) -> dict[str, float]:
    """Measure how much the births of several seeds have in common: the largest over their pairs."""
    pairs = [(snapshots[a].arrays, snapshots[b].arrays) for a, b in combinations(sorted(snapshots), 2)]
    if not pairs:
        return {}
    cosines = [abs(float(a["mean_direction"][-1] @ b["mean_direction"][-1])) for a, b in pairs]
    ranks = [abs(spearman(a["mean_prob"], b["mean_prob"])) for a, b in pairs]
    return {"cosine_between_seeds": max(cosines), "rank_between_seeds": max(ranks)}


def row(shape: Shape, folder: Path) -> dict[str, Any] | None:
    """Summarise the measured births of a shape; None if there are none."""
    snapshots = {
        int(path.name.rpartition("@")[2]): Snapshot.read(path)
        for path in folder.glob(f"{shape.name}@*")
        if (path / "summary.json").is_file()
    }
    if not snapshots:
        return None
    by_seed = []
    for seed, snapshot in sorted(snapshots.items()):
        ratio_L = snapshot.arrays["variance_discrepancy"]
        by_seed.append(
            {
                "seed": seed,
                **{name: snapshot.bias[name] for name in ("kl_uniform", "preference_ratio", "inter", "intra")},
                "variance_ratio_first": float(ratio_L[0]),
                "variance_ratio_last": float(ratio_L[-1]),
                "alignment": snapshot.bias["alignment"],
            }
        )
    config = shape.config
    facts = {"d_model": config.d_model, "n_layers": config.n_layers, "vocab_size": config.vocab_size}
    about = {"mlp": config.mlp, "init": config.init.kind, "std": config.init.std, "tied": config.tie_embeddings}
    about |= {"positions": config.positions, "norm": config.norm, "twin_of": shape.twin_of}
    return {"name": shape.name, "n_params": shape.n_params, **facts, **about, **_between(snapshots), "births": by_seed}


def _spread(values: list[float], form: str) -> str:
    middle, low, high = np.mean(values), min(values), max(values)
    return f"{middle:{form}}" + (f" ({low:{form}}–{high:{form}})" if len(values) > 1 else "")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Format the rows as a Markdown table."""
    lines = [
        "| shape | parameters | MLP | d, L, V | births | KL(p̄ ‖ uniform) | V·max p̄ | inter | intra "
        "| σ²(0)/later, first block | last block | cosine of two seeds | ρ of two seeds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        births = found["births"]
        columns = [
            _spread([birth[name] for birth in births], form)
            for name, form in (
                ("kl_uniform", ".4f"), ("preference_ratio", ".2f"), ("inter", ".3f"), ("intra", ".3f"),
                ("variance_ratio_first", ".1f"), ("variance_ratio_last", ".1f"),
            )
        ]  # fmt: skip
        between = [
            f"{found[name]:.3f}" if name in found else "–" for name in ("cosine_between_seeds", "rank_between_seeds")
        ]
        size = f"{found['n_params'] / 1e6:,.0f}M"
        where = f"{found['d_model']}, {found['n_layers']}, {found['vocab_size']}"
        cells = [found["name"], size, found["mlp"], where, str(len(births)), *columns, *between]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write(rows: list[dict[str, Any]], missing: list[str]) -> None:
    """Write the results."""
    probe = {"n_sequences": N_SEQUENCES, "seq_len": SEQ_LEN, "probe_seed": 0}
    content = {"probe": probe, "rows": rows, "not_run": missing}
    RESULTS.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    text = [
        "# Births over scale",
        "",
        "    python research/birth_over_scale/study.py --folder FOLDER",
        "",
        f"Births, {N_SEQUENCES} random sequences of {SEQ_LEN} tokens, float32, a block at a time. Mean over births, "
        "with the smallest and the largest; of two seeds, the largest |value| over pairs of births: the cosine of "
        "their seed directions after the last block, Spearman's ρ of their p̄.",
        "",
        *table(rows),
        "",
        f"Not run: {', '.join(missing) or 'nothing'}.",
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(text) + "\n")


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw four quantities against the number of parameters, a point for each birth."""
    from birthmark.report.pictures.axes import log_heights
    from birthmark.report.pictures.saving import save_png
    from birthmark.report.pictures.style import add_legend, figure_style, legend_line, new_figure, run_colour

    families = {"SwiGLU": ("swiglu",), "GELU": ("gelu", "gelu_tanh"), "ReLU": ("relu",)}
    panels = (
        ("kl_uniform", "KL(p̄ ‖ uniform), nats", True),
        ("inter", "inter contraction, last block", False),
        ("intra", "intra contraction, last block", False),
        ("variance_ratio_first", "σ²(0) over later, first block", False),
    )
    sizes = [found["n_params"] for found in rows]
    low, high = min(sizes), max(sizes)
    with figure_style():
        figure, axes = new_figure(480, 340, 2, 2, sharex=True)
        for axis, (name, label, log) in zip(axes.flat, panels, strict=True):
            for number, mlps in enumerate(families.values()):
                for marker, tied in (("o", False), ("D", True)):
                    points = [
                        (found["n_params"], birth[name])
                        for found in rows
                        if found["mlp"] in mlps and found["tied"] == tied
                        for birth in found["births"]
                    ]
                    look = {"color": run_colour(number), "marker": marker, "linestyle": "", "markersize": 3.5}
                    axis.plot([x for x, _ in points], [y for _, y in points], alpha=0.75, **look)
            axis.set_xscale("log")
            shown = [n for n in _TICKS if low / 1.5 < n < high * 1.5]
            axis.set_xticks(shown, labels=[f"{n // 10**6}M" if n < 10**9 else f"{n // 10**9}B" for n in shown])
            axis.set_xticks([], minor=True)
            axis.set_xlim(low / 1.3, high * 1.3)
            if log:
                log_heights(axis, [np.array([birth[name] for found in rows for birth in found["births"]])])
            else:
                bottom, top = axis.get_ylim()
                axis.set_ylim(min(0.0, bottom), top * 1.05)
            axis.set_title(label)
        for axis in axes[1]:
            axis.set_xlabel("parameters")
        entries = [
            (name, legend_line(color=run_colour(number), marker="o", linestyle="", markersize=4))
            for number, name in enumerate(families)
        ]
        tied = legend_line(color="#7b8087", marker="D", linestyle="", markersize=4)
        add_legend(figure, [*entries, ("diamond: tied tables", tied)])
        save_png(figure, out)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--most", type=float, default=9.0, help="billions of parameters")
    parser.add_argument("--only", default="", help="names, comma between them")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    every, only = shapes(args.folder), [name for name in args.only.split(",") if name]
    for shape in every:
        if shape.n_params <= args.most * 1e9 and (not only or shape.name in only):
            for seed in map(int, args.seeds.split(",")):
                run(shape, seed, args.folder)
    rows = [found for shape in every if (found := row(shape, args.folder)) is not None]
    have = {(found["name"], birth["seed"]) for found in rows for birth in found["births"]}
    write(rows, [f"{shape.name}@{seed}" for shape in every for seed in (0, 1, 2) if (shape.name, seed) not in have])
    if args.figure is not None:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
