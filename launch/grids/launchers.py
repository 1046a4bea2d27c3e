"""The launchers of a study's runs, by the name that ``--launcher`` gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .grid import Grid
from .slurm_array import sbatch_options, submit, write_array
from .wandb_sweep import write_sweep


@dataclass(frozen=True)
class Asked:
    """Options of the command line for a launcher."""

    sbatch: tuple[str, ...] = ()
    """``--sbatch``."""
    submit: bool = False
    """``--submit``."""


def _slurm(grid: Grid, asked: Asked) -> list[str]:
    file = write_array(grid, sbatch_options(asked.sbatch))
    said = submit(file) if asked.submit else f"submit it with: sbatch {file}"
    return [f"{file}: {len(grid.missing)} of {len(grid.trials)} runs, a task each", said]


def _wandb(grid: Grid, asked: Asked) -> list[str]:
    file = write_sweep(grid)
    first = f"{file}: {len(grid.missing)} of {len(grid.trials)} runs"
    return [first, f"make the sweep with: wandb sweep {file}; then on every machine: wandb agent ID"]


#: Functions from a study and its options to the lines to print. ``local`` is not here: it hands nothing over.
LAUNCHERS: dict[str, Callable[[Grid, Asked], list[str]]] = {"slurm": _slurm, "wandb": _wandb}
