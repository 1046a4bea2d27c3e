"""Runs of a study of seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...trainer.config_file import read_config
from ..trials import Trial, make_trial
from .file import SeedsStudy


def data_arm(data_seed: int) -> str:
    """Name the folder, and the column of a table, of the runs of one order of the data."""
    return f"data-{data_seed}"


def seeds_trials(study: SeedsStudy, out: Path, overrides: Mapping[str, Any] | None = None) -> list[Trial]:
    """List every run of ``study`` in the folder ``out``: birth by birth, each with every order of the data.

    Args:
        study: the study.
        out: the study's folder.
        overrides: dotted fields that replace those of the base.

    Raises:
        UsageError: the base is impossible, or a field that the study sets is overridden.
    """
    if "data.data_seed" in (overrides or {}):
        raise UsageError("--set data.data_seed: the study sets it for every run, leave it out")
    configs = {
        seed: read_config(study.base, {**(overrides or {}), "data.data_seed": seed}) for seed in study.data_seeds
    }
    return [
        make_trial(study.name, data_arm(data), init, configs[data], out / data_arm(data))
        for init in study.init_seeds
        for data in study.data_seeds
    ]
