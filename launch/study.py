"""A study: arms that differ from a base run in some fields, each born from the same seeds (docs/studies.md)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ..callbacks.records import RunDir, read_json
from ..errors import RunError, UsageError
from ..trainer.config import RunConfig
from ..trainer.stored import departures

Resolve = Callable[[Path, Sequence[str]], RunConfig]
"""From a run's config file and flags ``--field=value`` to the run."""

_SCALAR = (str, int, float, bool, type(None))
# An arm is a folder and a column of a table.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# What the study itself decides for every run.
_OURS = ("init_seed", "run_dir", "name")


@dataclass(frozen=True)
class Scale:
    """Another base for the same arms."""

    base: Path
    """Run config."""
    init_seeds: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """A study file, checked and with its paths resolved."""

    file: Path
    name: str
    base: Path
    """Run config that every arm changes."""
    init_seeds: tuple[int, ...]
    """Every arm is born from each of them, so that arms are compared pairwise."""
    arms: dict[str, dict[str, Any]]
    """Name → dotted fields that differ from the base; the first arm is what pictures compare the others with."""
    families: dict[str, list[str]]
    """Arms that share a panel of the figure; by default the arms in their order, a few to a panel."""
    scales: dict[str, Scale]

    def at(self, scale: str | None) -> Study:
        """The study on the base of ``scale``; UsageError if the file has none of that name."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise UsageError(f"--scale {scale}: {self.file} has {_listed(self.scales)}")
        chosen = self.scales[scale]
        return dataclasses.replace(
            self, name=f"{self.name}-{scale}", base=chosen.base, init_seeds=chosen.init_seeds, scales={}
        )

    def only(self, arms: Sequence[str]) -> Study:
        """The study with these arms alone, in the file's order."""
        for arm in arms:
            if arm not in self.arms:
                close = difflib.get_close_matches(arm, self.arms, n=1)
                hint = f"did you mean {close[0]}?" if close else f"{self.file} has {_listed(self.arms)}"
                raise UsageError(f"--arms {arm}: no such arm; {hint}")
        return dataclasses.replace(self, arms={name: f for name, f in self.arms.items() if name in arms})


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: the second would silently replace the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} stands twice (line {node.start_mark.line + 1} and below)")
        return super().construct_mapping(node, deep)


def read_fields(file: Path) -> dict[str, Any]:
    """The fields of a study file of any kind; UsageError names the file."""
    try:
        # Ours is a SafeLoader.
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: the file is {content!r}; write fields as `name: value`")
    return content


def read_study(file: Path) -> Study:
    """Read and check a study file of the kind ``arms``; UsageError names the file and the field."""
    content, reader = read_fields(file), Reader(file)
    reader.known(content, ("kind", "name", "base", "init_seeds", "arms", "families", "scales"), "")
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
    return Study(file, name, base, seeds, arms, families, scales)


class Reader:
    """Checks values of one study file; what is wrong is a UsageError that names file, field and value."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def wrong(self, field: str, value: Any, mend: str) -> UsageError:
        """The error to raise."""
        return UsageError(f"{self.file}: {field} is {value!r}: {mend}")

    def known(self, fields: Mapping[str, Any], names: Sequence[str], prefix: str) -> None:
        """Refuse fields of other names; ``prefix`` is where they stand, with its dot."""
        for field in fields:
            if field not in names:
                close = difflib.get_close_matches(str(field), names, n=1)
                hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(names)}"
                raise UsageError(f"{self.file}: {prefix}{field}: no such field; {hint}")

    def group(self, value: Any, field: str) -> dict[str, Any]:
        """Fields under a field."""
        if not isinstance(value, dict):
            raise self.wrong(field, value, "write fields as `name: value` under it")
        return value

    def named(self, value: Any, field: str) -> dict[str, Any]:
        """A group whose names become folders or columns."""
        for name in self.group(value, field):
            self.name(name, f"a name in {field}")
        return value

    def name(self, value: Any, field: str) -> None:
        """Refuse what can be no folder's name."""
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.wrong(field, value, "give a name of letters, digits and _ . + - (in quotes if it is a number)")

    def path(self, value: Any, field: str) -> Path:
        """A config file, relative to the study."""
        if not isinstance(value, str) or not value:
            raise self.wrong(field, value, "give the path of a run's config, relative to this file")
        path = self.file.parent / value
        if not path.is_file():
            raise self.wrong(field, value, f"no file {path}")
        return path

    def seeds(self, value: Any, field: str) -> tuple[int, ...]:
        """Different seeds, one at least."""
        whole = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
        if not whole or not value or len(set(value)) < len(value):
            raise self.wrong(field, value, "give a list of different whole numbers from 0")
        return tuple(value)

    def changes(self, value: Any, group: str) -> dict[str, dict[str, Any]]:
        """Names, each with dotted fields that differ from the base."""
        found = self.named(value, group)
        for name, fields in found.items():
            for field, wanted in self.group(fields, f"{group}.{name}").items():
                where = f"{group}.{name}.{field}"
                if field in _OURS:
                    raise self.wrong(where, wanted, "the study decides it, leave it out")
                plain = all(isinstance(item, _SCALAR) for item in (wanted if isinstance(wanted, list) else [wanted]))
                if not isinstance(field, str) or not plain:
                    raise self.wrong(where, wanted, "write one dotted field and its value, as in model.d_model: 64")
        return found

    def families(self, value: Any, arms: Mapping[str, Any]) -> dict[str, list[str]]:
        """Groups of arms."""
        families = self.group(value, "families")
        for family, members in families.items():
            if not isinstance(members, list) or not members:
                raise self.wrong(f"families.{family}", members, "give a list of arms")
            for member in members:
                if member not in arms:
                    raise self.wrong(f"families.{family}", member, "no such arm")
        return families


# ── its runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Trial:
    """One run of a study: an arm born from a seed."""

    arm: str
    seed: int
    base: Path
    flags: tuple[str, ...]
    """What the base's config is changed by, ``--field=value``."""
    config: RunConfig
    """The whole run."""
    run: RunDir

    @property
    def label(self) -> str:
        """What people call it: the end of its path."""
        return "/".join(self.run.path.parts[-2:])

    @property
    def log(self) -> Path:
        """What its process says."""
        return self.run.path.with_suffix(".log")

    @property
    def step(self) -> int:
        """Step of its last checkpoint; 0 if there is none."""
        return max(self.run.checkpoints_by_step(), default=0)

    @property
    def started(self) -> bool:
        """Whether it has been born."""
        return self.run.birth.is_file()

    @property
    def finished(self) -> bool:
        """Whether it has been trained to its last step."""
        return self.started and self.step >= self.config.trainer.max_steps


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


def common_flags(settings: Sequence[str]) -> list[str]:
    """Flags from ``FIELD=VALUE`` words; UsageError names the one that is neither."""
    for setting in settings:
        field, equals, _ = setting.partition("=")
        if not equals or not field or field in _OURS:
            why = "the study decides it" if field in _OURS else "write FIELD=VALUE, as in trainer.max_steps=100"
            raise UsageError(f"--set {setting}: {why}")
    return [f"--{setting}" for setting in settings]


def as_flags(fields: Mapping[str, Any]) -> list[str]:
    """Dotted fields as the command line takes them."""
    return [f"--{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in fields.items()]


def check_buildable(planned: Sequence[Trial]) -> None:
    """UsageError if an arm's model cannot be built, found without allocating it."""
    import torch

    from ..models.decoder import Decoder

    for trial in {trial.arm: trial for trial in planned}.values():
        try:
            with torch.device("meta"):
                Decoder(trial.config.model)
        except UsageError as error:
            raise UsageError(f"arm {trial.arm}: {error}") from None


def check_stored(trial: Trial) -> None:
    """UsageError if a run stands in the trial's folder that is not the trial's."""
    if not trial.started:
        return
    changed = [
        f"{name} {there!r} there, {here!r} here"
        for name, (there, here) in departures(trial.config, trial.run).items()
        if name not in ("name", "run_dir")
    ]
    if changed:
        raise UsageError(
            f"{trial.run.path}: a run of another config ({', '.join(changed[:3])}{', …' if changed[3:] else ''}); "
            "move it away or give another --out"
        )


def next_move(trial: Trial) -> Literal["start", "resume", "skip"]:
    """What has to be done for a trial. A folder of a run that died before its birth is made ready to start again."""
    if trial.finished:
        return "skip"
    if trial.started:
        read_json(trial.run.birth)
        return "resume"
    left = list(trial.run.path.iterdir()) if trial.run.path.is_dir() else []
    foreign = [file for file in left if file.name != trial.run.config.name and not file.name.startswith(".")]
    if foreign:
        raise RunError(f"{trial.run.path}: holds {foreign[0].name}, but no run; move it away")
    trial.run.config.unlink(missing_ok=True)
    return "start"
