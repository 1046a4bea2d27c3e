"""The runs of a study as a sweep of W&B: one file, whose agents do the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...child_python import python_command
from ...files import write_text
from ...yaml_files import yaml_text
from .grid import Grid


def sweep_config(grid: Grid) -> dict[str, Any]:
    """Return the sweep in the form that W&B documents: a grid over the names of the runs that are not finished.

    An agent replaces ``${args}`` by ``--trial=NAME``. The number of agents limits the simultaneous runs.
    """
    missing = [grid.trials[number] for number in grid.missing]
    return {
        "name": grid.name,
        "project": grid.trials[0].config.log.project,
        "description": f"The runs of the study {grid.name}, each by its name.",
        "program": "birthmark",
        "method": "grid",
        "metric": {"name": "val/loss", "goal": "minimize"},
        "parameters": {"trial": {"values": [trial.label for trial in missing]}},
        "command": [*python_command("-m", "birthmark.launch.cli"), *grid.words, "${args}"],
    }


def write_sweep(grid: Grid) -> Path:
    """Write ``sweep.yaml`` into the study's folder."""
    file = grid.out.absolute() / "sweep.yaml"
    write_text(file, yaml_text(sweep_config(grid)))
    return file
