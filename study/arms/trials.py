"""Runs of a study of arms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...trainer.config import RunConfig
from ...trainer.config_file import read_config
from ..trials import Trial, make_trial
from .file import ArmStudy


def arm_trials(study: ArmStudy, out: Path, overrides: Mapping[str, Any] | None = None) -> list[Trial]:
    """List every run of ``study`` in the folder ``out``, seed by seed.

    Arms with the same config (one repeats the base) share their runs.

    Args:
        study: the study.
        out: the study's folder.
        overrides: dotted fields that replace the base's, in every arm; an arm's own fields win over them.

    Raises:
        UsageError: an arm is impossible; the message names it.
    """
    configs: dict[str, RunConfig] = {}
    folders: dict[str, str] = {}
    for arm, fields in study.arms.items():
        try:
            config = read_config(study.base, {**(overrides or {}), **fields})
        except UsageError as error:
            raise UsageError(f"{study.file}: arms.{arm}: {error}") from None
        folders[arm] = next((folders[other] for other, same in configs.items() if same == config), arm)
        configs[arm] = config
    return [
        make_trial(study.name, arm, seed, configs[arm], out / folders[arm])
        for seed in study.init_seeds
        for arm in study.arms
    ]
