"""`birthmark launch`: one run in several processes, by the launch files that come with the package."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config import RunConfig
from ...trainer.config_file import config_of
from ...trainer.config_parser import Parser
from ...urls import hide_credentials
from ..job_arrays import fill_in, write_executable

SUMMARY = "Start one run in several processes, or write the script that does: torchrun, deepspeed or slurm."

_FILES = Path(__file__).parents[1]


@dataclass(frozen=True)
class _Launcher:
    """A launch file, and the options that it takes."""

    file: str
    needs: str
    """Program that runs it."""
    variables: Mapping[str, str]
    """Option → the environment variable that the file reads."""
    program_options: Mapping[str, str] = field(default_factory=dict)
    """Option → the option of the program that runs it."""
    file_beside: str = ""
    """Option without which the launch file reads a file beside it; "": none."""


_LAUNCHERS = {
    "torchrun": _Launcher(
        "torchrun.sh",
        "bash",
        {"nproc": "NPROC", "nnodes": "NNODES", "head": "HEAD", "max_restarts": "MAX_RESTARTS"},
    ),
    "deepspeed": _Launcher("deepspeed.sh", "bash", {"hostfile": "HOSTFILE", "port": "PORT"}, file_beside="hostfile"),
    "slurm": _Launcher(
        "slurm.sbatch",
        "sbatch",
        {"max_restarts": "MAX_RESTARTS", "port": "PORT", "wait_s": "WAIT_S"},
        {name: f"--{name.replace('_', '-')}" for name in ("nodes", "gpus_per_node", "time", "partition", "account")},
    ),
}

#: Options of the launchers → their help.
_OPTIONS = {
    "nproc": "Processes on a node; by default one per GPU.",
    "nnodes": "Nodes, each of which is given the same command; 2:4 goes on with those that are left. By default 1.",
    "head": "HOST:PORT of one of several nodes, which all reach.",
    "max_restarts": "How often processes that died are started again; by default 3.",
    "hostfile": "File with lines of `host slots=GPUS`.",
    "port": "Where the processes meet.",
    "wait_s": "Seconds for the checkpoint before the job's time is over; by default 270.",
    "nodes": "As sbatch has it.",
    "gpus_per_node": "As sbatch has it.",
    "time": "As sbatch has it.",
    "partition": "As sbatch has it.",
    "account": "As sbatch has it.",
}

#: Options that are whole numbers → the least and the largest.
_NUMBERS = {"nproc": (1, 10**6), "max_restarts": (0, 10**6), "port": (1, 65535), "wait_s": (1, 10**6)}


def add_options(parser: Parser) -> None:
    """Add the options for the launcher, its settings, and the arguments of `pretrain`."""
    parser.passes_on = True
    parser.usage = "birthmark launch torchrun|deepspeed|slurm [--write FILE] [options] [any option of pretrain]"
    parser.add_argument("launcher", type=str, metavar="LAUNCHER", help=f"{', '.join(_LAUNCHERS)}.")
    parser.add_argument(
        "arguments", type=str, nargs="*", metavar="...", help="What pretrain is given: birthmark pretrain --help."
    )
    parser.add_argument(
        "--write", type=str | None, metavar="FILE", help="Start nothing: write the script, with all that was given."
    )
    for name, text in _OPTIONS.items():
        launchers = ", ".join(key for key, one in _LAUNCHERS.items() if name in {*one.variables, *one.program_options})
        parser.add_argument(f"--{name}", type=str | None, metavar="X", help=f"{launchers}: {text}")


def expand(arguments: Sequence[str]) -> list[str]:
    """Move our own options to the front; the rest belongs to `pretrain` and follows ``--``."""
    if {"-h", "--help"} & set(arguments):
        return ["--help"]
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("write", *_OPTIONS):
        own.add_argument(f"--{name}", nargs="?", const="")
    own.add_argument("--debug", action="store_true")
    known, rest = own.parse_known_args(arguments)
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{' '.join(['launch', *rest[:1]])}: name the launcher first: {', '.join(_LAUNCHERS)}")
    given = [f"--{name}={value}" for name, value in vars(known).items() if isinstance(value, str)]
    return [*given, *(["--debug"] if known.debug else []), "--", *rest]


def run(options: Namespace) -> int:
    """Write the script, or replace this process by the launcher.

    Raises:
        UsageError: an option is impossible; this is checked before any process starts.
    """
    launcher = _LAUNCHERS.get(options.launcher)
    if launcher is None:
        raise UsageError(f"launch {options.launcher}: give {', '.join(_LAUNCHERS)}")
    given = {name: options[name] for name in _OPTIONS if options[name] is not None}
    for name, value in given.items():
        if name not in {*launcher.variables, *launcher.program_options}:
            raise UsageError(f"--{name}: {options.launcher} does not read it, leave it out")
        if not value:
            raise UsageError(f"--{name}: give a value")
        _check_value(name, value)
    if options.head is not None and options.nnodes is None:
        raise UsageError(f"--head {options.head}: is one of several nodes; give --nnodes too, or leave --head out")
    if options.write is not None and launcher.file_beside and launcher.file_beside not in given:
        raise UsageError(f"--write {options.write}: give --{launcher.file_beside} too: the script finds none beside it")
    words = list(options.arguments)
    # If the launcher starts here, on this machine, check the config too; a file or a job may be meant for other
    # machines.
    config = _check_run(words, whole=options.write is None and launcher.needs == "bash")
    if config is not None and options.launcher == "torchrun":
        _check_processes(config, options.nproc, options.nnodes or "1")
    if options.write is not None:
        return _write(launcher, given, words, options.write)
    _start(launcher, given, words)


def _check_value(name: str, value: str) -> None:
    """Raise UsageError if an option's value is outside its range or is no number."""
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        if not re.fullmatch("[0-9]{1,9}", value) or not least <= int(value) <= most:
            raise UsageError(f"--{name} {value}: give a whole number from {least} to {most}")
    if name == "nnodes":
        ends = re.fullmatch("([0-9]{1,9})(?::([0-9]{1,9}))?", value)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2] or ends[1]):
            raise UsageError(f"--nnodes {value}: give a whole number, at least 1, or the fewest and the most, as 2:4")


def _check_run(words: Sequence[str], *, whole: bool) -> RunConfig | None:
    """Check the run, and return it if the check is of the ``whole``, not of the fields' names and types alone."""
    from ..command_table import parse_command

    if {"-h", "--help"} & set(words):
        raise UsageError("launch: birthmark pretrain --help lists what a run is given")
    parsed = parse_command("pretrain", words)
    return config_of(parsed) if whole else None


def _check_processes(config: RunConfig, per_node: str | None, nodes: str) -> None:
    """Raise UsageError if this number of processes cannot share the run; no check if the numbers are unknown."""
    if per_node is None or ":" in nodes:
        return
    from ...trainer.processes.launched_process import LaunchedProcess
    from ...trainer.strategies.lightning_setup import check_launch

    check_launch(config.trainer, LaunchedProcess(0, int(per_node) * int(nodes), 0, int(per_node)))


def _start(launcher: _Launcher, given: Mapping[str, str], words: Sequence[str]) -> NoReturn:
    """Replace this process by the program that runs the launch file."""
    program = shutil.which(launcher.needs)
    if program is None:
        raise UsageError(f"{launcher.needs}: not found on this machine; --write FILE writes the script for another")
    if launcher.file == "deepspeed.sh" and importlib.util.find_spec("deepspeed") is None:
        raise UsageError("deepspeed: not installed; DS_BUILD_OPS=0 pip install deepspeed")
    variables = {"PYTHON": sys.executable} | _variables(launcher, given)
    beside = [f"{launcher.program_options[name]}={v}" for name, v in given.items() if name in launcher.program_options]
    os.execve(program, [program, *beside, str(_FILES / launcher.file), *words], {**os.environ, **variables})


def _variables(launcher: _Launcher, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the launch file reads, with the given values."""
    return {launcher.variables[name]: value for name, value in given.items() if name in launcher.variables}


def _write(launcher: _Launcher, given: Mapping[str, str], words: Sequence[str], out: str) -> int:
    """Write the launch file with the given values filled in; it depends on no file beside it."""
    if Path(out).exists():
        raise UsageError(f"--write {out}: exists already; give another name, or move it away")
    variables = {"PYTHON": sys.executable} | _variables(launcher, given)
    options = launcher.program_options
    sbatch = {options[name].removeprefix("--"): value for name, value in given.items() if name in options}
    words = [hide_credentials(word) for word in words]
    text = fill_in((_FILES / launcher.file).read_text(encoding="utf-8"), variables, words, sbatch)
    write_executable(Path(out), text)
    print(f"{out}: start it with {'sbatch' if launcher.needs == 'sbatch' else 'bash'} {out}")
    return 0
