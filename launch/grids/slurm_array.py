"""The runs of a study as a SLURM array: one file, and sbatch if it is to be submitted too."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from ...errors import RunError, UsageError
from ..batch_file import fill_in, write_executable
from .grid import Grid

_TEMPLATE = Path(__file__).parents[1] / "array.sbatch"
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
        if not (equals and value and option.replace("-", "").isalnum()) or "\n" in value:
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
    ours = {"array": ranges(grid.missing) + limit, "output": f"{logs}/%A_%a.log"}
    # A relative path of a config holds here.
    here = (f"cd {shlex.quote(str(Path.cwd()))}",)
    template = _TEMPLATE.read_text(encoding="utf-8")
    text = fill_in(template, {"PYTHON": sys.executable}, grid.words, {**ours, **options}, first=here)
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
