"""The file of a study of arms (docs/studies.md), and its runs: they differ from a base in some fields."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import UsageError
from ...trainer.config import RunConfig
from ...trainer.config_file import read_config
from ..study_file import Reader, read_fields
from ..trials import Trial, make_trial


@dataclass(frozen=True)
class Scale:
    """A further base for the same arms."""

    base: Path
    """Run config."""
    init_seeds: tuple[int, ...]


@dataclass(frozen=True)
class ArmStudy:
    """A study file of the kind ``arms``, checked and with its paths resolved."""

    file: Path
    name: str
    base: Path
    """Run config that every arm changes."""
    init_seeds: tuple[int, ...]
    """Seeds from each of which every arm is born, so that arms are compared birth by birth."""
    arms: dict[str, dict[str, Any]]
    """Name → dotted fields that differ from the base; pictures compare the others with the first arm."""
    families: dict[str, list[str]]
    """Arms that share a panel of the figure; arms without a family fill panels in their order."""
    scales: dict[str, Scale]
    compare: Literal["random", "text"] | None = None
    """Probe for the pairwise comparison of the ends of all runs; None: no comparison."""

    def at(self, scale: str | None) -> ArmStudy:
        """Return the study on the base of ``scale``; UsageError if the file has none of that name."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise UsageError(f"--scale {scale}: {self.file} has {_listed(self.scales)}")
        chosen = self.scales[scale]
        return dataclasses.replace(
            self, name=f"{self.name}-{scale}", base=chosen.base, init_seeds=chosen.init_seeds, scales={}
        )

    def only(self, arms: Sequence[str]) -> ArmStudy:
        """Return the study with only these arms, in the file's order."""
        for arm in arms:
            if arm not in self.arms:
                close = difflib.get_close_matches(arm, self.arms, n=1)
                hint = f"did you mean {close[0]}?" if close else f"{self.file} has {_listed(self.arms)}"
                raise UsageError(f"--arms {arm}: no such arm; {hint}")
        return dataclasses.replace(self, arms={name: f for name, f in self.arms.items() if name in arms})


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_arm_study(file: Path) -> ArmStudy:
    """Read and check a study file of the kind ``arms``; UsageError names the file and the field."""
    content, reader = read_fields(file), Reader(file)
    reader.known(content, ("kind", "name", "base", "init_seeds", "arms", "families", "scales", "compare"), "")
    for field in ("base", "arms"):
        if field not in content:
            raise UsageError(f"{file}: {field} is missing")
    arms = reader.changes(content["arms"], "arms")
    if not arms:
        raise reader.wrong("arms", content["arms"], "name at least one")
    base, seeds = reader.path(content["base"], "base"), reader.seeds(content.get("init_seeds", [0]), "init_seeds")
    scales = {}
    for name, fields in reader.named(content.get("scales", {}), "scales").items():
        where = f"scales.{name}"
        reader.known(reader.group(fields, where), ("base", "init_seeds"), f"{where}.")
        scales[name] = Scale(
            base=reader.path(fields["base"], f"{where}.base") if "base" in fields else base,
            init_seeds=reader.seeds(fields["init_seeds"], f"{where}.init_seeds") if "init_seeds" in fields else seeds,
        )
    name = content.get("name", file.stem)
    reader.name(name, "name")
    families = reader.families(content.get("families", {}), arms)
    compare = content.get("compare")
    if compare not in (None, "random", "text"):
        raise reader.wrong("compare", compare, "write random or text, or leave it out")
    return ArmStudy(file, name, base, seeds, arms, families, scales, compare)


# ---------------------------------------------------------------- runs of a study of arms


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
