"""The runs of a study of arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...measure.records import RunDir
from ...trainer.config import RunConfig
from ..trials import Resolve, Trial, as_flags
from .file import Study


def trials(study: Study, out: Path, resolve: Resolve, common: Sequence[str] = ()) -> list[Trial]:
    """Every run of ``study`` in ``out``, seed by seed, all resolved.

    Arms that come to the same config (one that says what the base says already) share their runs.

    Args:
        study: what to run.
        out: the study's folder.
        resolve: how a base and flags become a run.
        common: flags that change the base of every arm.

    Raises:
        UsageError: an arm is impossible; the message names it.
    """
    configs: dict[str, RunConfig] = {}
    flags: dict[str, tuple[str, ...]] = {}
    folders: dict[str, str] = {}
    for arm, fields in study.arms.items():
        flags[arm] = (*common, *as_flags(fields))
        try:
            config = resolve(study.base, flags[arm])
        except UsageError as error:
            raise UsageError(f"{study.file}: arms.{arm}: {error}") from None
        folders[arm] = next((folders[other] for other, same in configs.items() if same == config), arm)
        configs[arm] = config
    return [
        Trial(
            arm,
            seed,
            study.base,
            (*flags[arm], f"--init_seed={seed}", f"--name={study.name}-{arm}-{seed}"),
            dataclasses.replace(configs[arm], init_seed=seed),
            RunDir(out / folders[arm] / f"seed-{seed}"),
        )
        for seed in study.init_seeds
        for arm in study.arms
    ]
