"""Studies whose runs others start: as an array of SLURM or a sweep of W&B, from one file each."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..child_python import python_command
from ..errors import RunError, UsageError
from ..files import atomic_path, write_text
from ..messages import one_line
from ..study.trials import Trial, each_once
from ..yaml_files import yaml_text

# ---------------------------------------------------------------- files for launchers, with what was given filled in


def fill_in(
    text: str,
    variables: Mapping[str, str],
    words: Sequence[str],
    sbatch: Mapping[str, str],
    *,
    first: Sequence[str] = (),
) -> str:
    """Fill the user's values into the text of a launch file.

    Args:
        text: text of the launch file.
        variables: environment variables that it reads; the environment of the start has precedence.
        words: arguments that it passes on, before those of its start.
        sbatch: options of SLURM's sbatch, without their dashes, in place of the file's own of these names.
        first: commands at its beginning.

    Raises:
        UsageError: a value that no line of sbatch's can hold.
    """
    lines = [*first, *(f'[ -n "${{{name}:-}}" ] || {name}={shlex.quote(value)}' for name, value in variables.items())]
    if words:
        lines.append(f'set -- {shlex.join(words)} "$@"')
    text = re.sub(r"^(#.*\n)?(\[.*\|\| )?\. .*/find_python\.sh\"\n", "", text, flags=re.MULTILINE)
    text = text.replace("set -euo pipefail\n", "set -euo pipefail\n\n" + "\n".join(lines) + "\n", 1)
    for name, value in sbatch.items():
        # sbatch takes the last line of an option: the file's own would win.
        text = re.sub(rf"^#SBATCH --{re.escape(name)}(=.*)?\n", "", text, flags=re.MULTILINE)
        text = text.replace("#SBATCH ", f"#SBATCH --{name}={_quoted(name, value)}\n#SBATCH ", 1)
    return text


def _quoted(name: str, value: str) -> str:
    """Quote an option's value as sbatch reads it in a file: in quotation marks if it contains white space.

    Raises:
        UsageError: it would end its line or the quotation.
    """
    if '"' in value or not value.isprintable():
        raise UsageError(
            f"--{name} {one_line(value)}: stands in a line of the file for sbatch; leave quotation marks and "
            "characters that do not print out"
        )
    return f'"{value}"' if re.search(r"\s", value) else value


def write_executable(path: Path, text: str) -> None:
    """Write a program atomically."""
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")
        new.chmod(0o755)


# ---------------------------------------------------------------- grid
# The runs of a study, for a launcher outside this process.


@dataclass(frozen=True)
class Grid:
    """The study as a launcher gets it."""

    name: str
    """The study's."""
    out: Path
    """Folder of the study."""
    trials: Sequence[Trial]
    """The runs, each once: the index of a run is its number."""
    words: Sequence[str]
    """`birthmark ablate` of this study, without ``birthmark``; with ``--trial`` it makes one run. Its paths hold in any
    folder."""
    jobs: int | None
    """Runs at a time; None: any number."""

    @property
    def missing(self) -> list[int]:
        """Numbers of the runs that are not finished."""
        return [number for number, trial in enumerate(self.trials) if not trial.finished]


def make_grid(name: str, out: Path, trials: Sequence[Trial], words: Sequence[str], jobs: int | None) -> Grid:
    """See `Grid`; trials that share a run count once."""
    return Grid(name, out, each_once(trials), words, jobs)


# ---------------------------------------------------------------- the runs of a study as a SLURM array
# One file, and sbatch if it is to be submitted too.

_TEMPLATE = Path(__file__).parent / "array.sbatch"
#: Options of sbatch that the file sets itself.
_OURS = ("array", "output", "requeue", "signal", "open-mode")


def sbatch_options(words: Sequence[str]) -> dict[str, str]:
    """Read the words after ``--sbatch`` into values by option; a UsageError repeats a word that is no
    ``OPTION=VALUE``.
    """
    found = {}
    for word in words:
        option, equals, value = word.partition("=")
        option = option.removeprefix("--")
        if not (equals and value and option.replace("-", "").isalnum()):
            raise UsageError(f"--sbatch {word}: write OPTION=VALUE as sbatch has it, as in gpus=1 time=2:00:00")
        if option in _OURS:
            raise UsageError(f"--sbatch {word}: the array sets it, leave it out")
        found[option] = value
    return found


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as SLURM writes them: ``0-2,5``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def write_array(grid: Grid, options: Mapping[str, str]) -> Path:
    """Write ``array.sbatch`` into the study's folder: one task for each unfinished run.

    Args:
        grid: the study.
        options: further options of sbatch, by name.
    """
    out = grid.out.absolute()
    limit = "" if grid.jobs is None else f"%{grid.jobs}"
    logs = str(out / "slurm").replace("%", "%%")
    of_array = {"array": ranges(grid.missing) + limit, "output": f"{logs}/%A_%a.log"}
    # A relative path of a config holds here.
    here = (f"cd {shlex.quote(str(Path.cwd()))}",)
    template = _TEMPLATE.read_text(encoding="utf-8")
    text = fill_in(template, {"PYTHON": sys.executable}, grid.words, {**of_array, **options}, first=here)
    file = out / "array.sbatch"
    write_executable(file, text)
    # sbatch makes no folder for its logs.
    (out / "slurm").mkdir(exist_ok=True)
    return file


def submit(file: Path) -> str:
    """Submit the file with sbatch; return the last line of its output.

    Raises:
        UsageError: there is no sbatch.
        RunError: sbatch refused the file.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(f"--submit: no sbatch on this machine; {file} is written, submit it where there is one")
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise RunError(f"sbatch {file}: {said[-1]}")
    return (done.stdout.strip().splitlines() or ["submitted"])[-1]


# ---------------------------------------------------------------- the runs of a study as a sweep of W&B
# One file, whose agents do the runs.


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


# ---------------------------------------------------------------- launchers
# The launchers of a study's runs, by the name that ``--launcher`` gives them.


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
