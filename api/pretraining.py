"""Pretraining from Python."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..files import user_path
from ..measure.records import RunDir
from ..models.config import dotted
from ..trainer.config import RunConfig
from ..trainer.config_file import build_config, read_config
from .run import Run

if TYPE_CHECKING:
    from ..trainer.run import Outcome


def pretrain(
    config: RunConfig | Mapping[str, Any] | str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Run:
    """Train a model, with a snapshot at birth and at every checkpoint, like ``birthmark pretrain``.

    Args:
        config: a config, its fields (nested or dotted), a YAML file, or the name of a config that comes with the
            package, such as ``demo``.
        overrides: fields that replace the config's, by dotted names or nested: ``{"trainer.max_steps": 100}``.
        run_dir: the run's folder; by default the config's own, else ``runs/NAME``.
        resume: go on with the run in that folder.
        progress: print the training's progress.

    Raises:
        UsageError: an impossible config, or a folder that is in use.
        RunError: training failed on the way; all checkpoints so far are intact.
    """
    if isinstance(config, RunConfig):
        config = dataclasses.asdict(config)
    if isinstance(config, Mapping):
        from ..trainer.continued_rate import with_continued_rate

        named, found = "run", build_config(with_continued_rate(dotted(config) | dotted(overrides or {})))
    else:
        named, found = Path(config).stem, read_config(config, overrides)
    if run_dir is not None:
        found = dataclasses.replace(found, run_dir=str(run_dir))
    _, outcome = run_training(
        in_its_folder(found, named), resume=resume, console=Console(quiet=not progress), report=False
    )
    return Run(outcome.run.path)


def in_its_folder(config: RunConfig, name: str) -> RunConfig:
    """Give a config a name and a folder if it lacks them: ``name`` and ``runs/NAME``.

    In a sweep of W&B, whose runs have one config, the folder has the run's id in its name too.
    """
    name = config.name or name
    of_sweep = f"-{os.environ['WANDB_RUN_ID']}" if {"WANDB_SWEEP_ID", "WANDB_RUN_ID"} <= os.environ.keys() else ""
    return dataclasses.replace(config, name=name, run_dir=str(user_path(config.run_dir or f"runs/{name}{of_sweep}")))


def run_training(config: RunConfig, *, resume: bool, console: Console, report: bool) -> tuple[RunConfig, Outcome]:
    """Train in the run's folder, and write its page if requested; return the config, with the model that it starts
    from, and the outcome.
    """
    from ..trainer.initial_model import resolve_init_from
    from ..trainer.run import pretrain as train

    config = resolve_init_from(config)
    return config, train(config, RunDir(Path(config.run_dir)), resume=resume, console=console, report=report)
