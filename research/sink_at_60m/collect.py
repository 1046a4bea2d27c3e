"""Runs of the study as one small file: every scalar of every snapshot, and the losses of training.

python research/sink_at_60m/collect.py RUN [RUN …]    # into results.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from birthmark.files import write_json
from birthmark.measure.metrics_log import metrics_by_step
from birthmark.measure.records import RunDir

RESULTS = Path(__file__).with_name("results.json")
#: Significant digits: more than any figure or table shows.
_DIGITS = 6


def collected(run: RunDir) -> dict[str, object]:
    """Return the birth of a run, its milestones and the losses of its training."""
    by_step = metrics_by_step(run)
    birth = run.read_birth()
    return {
        "birth": birth["digest"],
        "n_params": birth["n_params"],
        "milestones": [
            {name: float(f"{value:.{_DIGITS}g}") for name, value in entry.items()} | {"step": step}
            for step, entry in by_step.items()
            if "val/loss" in entry
        ],
        "train_loss": {
            str(step): round(entry["train/loss"], 4) for step, entry in by_step.items() if "train/loss" in entry
        },
    }


if __name__ == "__main__":
    runs = {Path(path).name: collected(RunDir.open(Path(path))) for path in sys.argv[1:]}
    write_json(RESULTS, runs)
    print(f"{RESULTS}: {', '.join(runs)}")
