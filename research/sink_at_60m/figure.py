"""The study's figure, ``docs/img/sink-at-60m.png``, from ``results.json``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

FOLDER = Path(__file__).parent
#: Tokens of a step.
TOKENS = 32 * 1024
ARMS = {
    "plain": ("plain", "#1f77b4", "-"),
    "headnorm": ("head-wise RMSNorm", "#d62728", "-"),
    "correlated": ("calibrated, ρ estimated", "#2ca02c", "-"),
    "plain_slow": ("plain, a third of the rate", "#1f77b4", ":"),
}
#: Panels: name of the scalar, title, scale of the axis.
PANELS = (
    ("val/loss", "Validation loss, nats", "linear"),
    ("bias_text/sink_mass_max", "Sink mass of the strongest head, on text", "linear"),
    ("bias_text/massive_max", "Largest state |h|, on text", "log"),
    ("seedprint/z", "Lineage: z of hidden states against the own birth", "symlog"),
)


def draw(axes: Axes, name: str, title: str, scale: str, runs: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """Draw one scalar of every arm over the tokens."""
    for arm, (label, colour, style) in ARMS.items():
        points = [entry for entry in runs[arm]["milestones"] if name in entry and entry["step"] > 0]
        tokens = [entry["step"] * TOKENS / 1e6 for entry in points]
        axes.plot(tokens, [entry[name] for entry in points], style, color=colour, label=label, linewidth=1.6)
    axes.set_xscale("log")
    if scale != "linear":
        axes.set_yscale(scale, **({"linthresh": 3} if scale == "symlog" else {}))
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw all panels."""
    runs = json.loads((FOLDER / "results.json").read_text())
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    for axes, (name, title, scale) in zip(grid.flat, PANELS, strict=True):
        draw(axes, name, title, scale, runs)
        if name == "bias_text/sink_mass_max":
            uniform = runs["plain"]["milestones"][0]["bias_text/sink_uniform"]
            axes.axhline(uniform, color="0.5", linewidth=0.8)
            axes.annotate("uniform attention", (0.04, uniform), fontsize=8, color="0.4", va="bottom")
        if name == "seedprint/z":
            axes.axhspan(-3, 3, color="0.9", zorder=0)
            axes.set_ylim(bottom=-3)
            axes.annotate("strangers", (0.04, 0), fontsize=8, color="0.4", va="center")
    for axes in grid[1]:
        axes.set_xlabel("tokens, millions")
    grid[0, 0].legend(fontsize=8, frameon=False, loc="lower left")
    figure.tight_layout()
    figure.savefig(FOLDER.parents[1] / "docs" / "img" / "sink-at-60m.png", dpi=110)


if __name__ == "__main__":
    main()
