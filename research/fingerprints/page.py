"""The results as Markdown, and a picture of them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from birthmark.measure.hidden_states import FingerprintProbe
from birthmark.metrics.seedprint import HiddenStates
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.report.pictures.axes import turned_names
from birthmark.report.pictures.saving import save_png
from birthmark.report.pictures.style import INK, MUTED, PAPER, figure_style, new_figure, pale_to_full

from .evidence import Evidence, gather
from .method import Method, compare
from .pairs import PROBE_LEN
from .results import Rate, Summary

#: 9 million parameters.
LARGER = ModelConfig(d_model=256, n_layers=6, n_heads=8, vocab_size=8192, max_seq_len=64, mlp="swiglu")
N_INPUTS = 300


class Cost(NamedTuple):
    """Cost of one test."""

    method: str
    seconds: float
    """Processor time, without the pass."""
    mib: float | None
    """Peak of the process' memory above the level before the test; None where the system does not say."""


def _memory(field: str) -> float | None:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)


def _forget_peak() -> None:
    """Start measuring the memory peak from now on; free memory that is still held would hide it, so it first goes back
    to the system.
    """
    file = Path("/proc/self/clear_refs")
    if file.is_file():
        ctypes.CDLL(None).malloc_trim(0)
        file.write_text("5")


def costs(methods: Sequence[Method], config: ModelConfig = LARGER, n_inputs: int = N_INPUTS) -> Iterator[Cost]:
    """Measure each method on two births of a config; ranks and all other intermediate results are computed anew for
    each method.
    """
    probe = FingerprintProbe(n_inputs=n_inputs, seq_len=PROBE_LEN)
    a, b = (gather(f"birth {seed}", born(config, seed), probe) for seed in (0, 1))
    for method in methods:
        fresh = [_fresh(model) for model in (a, b)]
        _forget_peak()
        before, start = _memory("VmRSS"), time.process_time()
        compare(method, *fresh)
        seconds, peak = time.process_time() - start, _memory("VmHWM")
        yield Cost(method.name, seconds, None if before is None or peak is None else max(peak - before, 0.0))


def _fresh(model: Evidence) -> Evidence:
    return replace(model, final=HiddenStates(model.final.x_ND))


# ---------------------------------------------------------------- the results as Markdown, and a picture of them


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [_row(head), "|" + "---|" * len(head), *(_row(cells) for cells in rows)]


def _share(rate: Rate) -> str:
    return f"{100 * rate.share:.0f}" if rate.n else "–"


def main_table(found: Mapping[str, Summary]) -> list[str]:
    """Format the power and false alarms of every method, by its own rule and at the threshold from held-out
    strangers.
    """
    head = (
        "method", "kin tested, %", "kin found, own rule", "strangers called kin, own rule",
        "kin found at 1 % of held-out strangers", "other strangers above that", "area under ROC",
    )  # fmt: skip
    rows = [
        (
            name, _share(s.tested_kin), s.own_power or "no rule", s.own_false or "no rule", s.power, s.false,
            f"{s.area:.3f}",
        )
        for name, s in found.items()
    ]  # fmt: skip
    return _table(head, rows)


def group_table(found: Mapping[str, Summary], which: str) -> list[str]:
    """Format percentages by group, a column for each method: ``which`` is a field of `Summary`."""
    methods = [name for name, s in found.items() if getattr(s, which)]
    groups = dict.fromkeys(group for name in methods for group in getattr(found[name], which))
    nothing = Rate(0, 0)
    rows = [
        (
            group,
            max(getattr(found[name], which).get(group, nothing).n for name in methods),
            *(_share(getattr(found[name], which).get(group, nothing)) for name in methods),
        )
        for group in groups
    ]
    return _table(("group", "pairs", *methods), rows)


def cost_table(found: Mapping[str, Summary], costs: Sequence[Cost]) -> list[str]:
    """Format the processor time and memory of one test of each method."""
    by_name = {cost.method: cost for cost in costs}
    rows = []
    for name, s in found.items():
        cost = by_name.get(name)
        seconds = "–" if cost is None else f"{cost.seconds:.2f}"
        mib = "–" if cost is None or cost.mib is None else f"{cost.mib:.0f}"
        rows.append((name, f"{s.ms:.1f}", seconds, mib))
    return _table(("method", "bench pair, ms", "larger pair, s", "its peak memory, MiB"), rows)


def method_table(methods: Sequence[Method]) -> list[str]:
    """Format the requirements of each method."""
    return _table(
        ("method", "source", "reads", "must be the same"),
        [
            (
                method.name,
                method.source,
                ", ".join(need for need in method.needs if need in ("weights", "states")),
                ", ".join(need for need in method.needs if need not in ("weights", "states")) or "–",
            )
            for method in methods
        ],
    )


def draw(found: Mapping[str, Summary], file: Path) -> None:
    """Draw the kin found at 1 % of held-out strangers, methods by groups; a dash if there was no test or no
    threshold.
    """
    groups = list(next(iter(found.values())).power_of)
    nothing = Rate(0, 0)
    share_MG = np.array([[s.power_of.get(group, nothing).share for group in groups] for s in found.values()])
    with figure_style():
        figure, axes = new_figure(30 * len(groups) + 170, 17 * len(found) + 90)
        axes.grid(visible=False)
        axes.imshow(np.ma.masked_invalid(share_MG), cmap=pale_to_full(), vmin=0, vmax=1, aspect="auto")
        for (m, g), share in np.ndenumerate(share_MG):
            text = "–" if np.isnan(share) else f"{100 * share:.0f}"
            colour = MUTED if np.isnan(share) else PAPER if share > 0.6 else INK
            axes.text(g, m, text, ha="center", va="center", color=colour, fontsize=7)
        turned_names(axes, groups, 40)
        axes.set_yticks(range(len(found)), labels=[name.strip("`") for name in found])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title("Kin found, %, at the threshold that 1 % of held-out strangers pass; –: none, or no test")
        save_png(figure, file)
