"""The ``birthmark`` command: parse, run, and tell people in one line what went wrong."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from .. import __version__
from ..callbacks.records import RunDir
from ..errors import RunError, UsageError
from ..trainer.config import RunConfig

# The dataclasses' attribute docstrings are the help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def _fields(config: type, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a tree of dataclasses."""
    names = []
    for name, value in ((f.name, f.default_factory) for f in dataclasses.fields(config)):
        names.append(prefix + name)
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            names += _fields(value, f"{prefix}{name}.")
    return names


def _unknown(name: str) -> str:
    """A line about a field that does not exist, with the one that was probably meant."""
    known = _fields(RunConfig)
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75) or [
        k for k in known if difflib.SequenceMatcher(None, k.rpartition(".")[2], last).ratio() > 0.8
    ]
    return f"{name}: no such field" + (f"; did you mean {close[0]}?" if close else "; see birthmark pretrain --help")


def _kind(annotation: str) -> str:
    """A type as people say it."""
    choices = re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", annotation)
    if choices:
        return f"one of {choices[1]}"
    simple = re.fullmatch(r"<class '(\w+)'>", annotation)
    return {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(
        simple[1] if simple else annotation, annotation
    )


def explain(message: str) -> str:
    """One line for a person, from a message of the argument parser."""
    line = " ".join(message.split())
    for pattern, rewrite in (
        (r"Group '([^']+)' does not accept option '([^']+)'", lambda m: _unknown(f"{m[1]}.{m[2]}")),
        (r"Group '([^']+)' does not accept nested key '([^']+)'", lambda m: _unknown(f"{m[1]}.{m[2]}")),
        (r"Subcommand '[^']+' does not accept option '([^']+)'", lambda m: _unknown(m[1])),
        (
            r"the following arguments are required: \w+\.(\w+)",
            lambda m: f"{m[1]}: missing; see the command with --help",
        ),
        (r"unrecognized arguments: --?([^ =]+)", lambda m: _unknown(m[1])),
        (
            r"Parser key \"([^\"]+)\": Expected a (?:typing\.)?(.+?)\. Got value: (.*)",
            lambda m: f"{m[1]}: {m[3]!r} is not {_kind(m[2])}",
        ),
        (
            r"Parser key \"([^\"]+)\": Does not validate against any of the Union subtypes .*Given value: (.*)",
            lambda m: f"{m[1]}: {m[2]!r} is not a value of this field; see its type in birthmark pretrain --help",
        ),
        (r"Parser key \"([^\"]+)\": (.*)", lambda m: f"{m[1]}: {m[2]}"),
    ):
        found = re.search(pattern, line)
        if found:
            return rewrite(found)
    return line


class _Parser(ArgumentParser):
    """Raises UsageError in place of printing a usage text and leaving."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(explain(message))


def build_parser() -> tuple[_Parser, dict[str, _Parser]]:
    """The whole command line's parser, and its commands' by name."""
    parser = _Parser(prog="birthmark", description="Pretrain transformers and see the mark they were born with.")
    parser.add_argument("--version", action="version", version=f"birthmark {__version__}")
    commands = parser.add_subcommands(dest="command")

    pretrain = _Parser(
        usage="birthmark pretrain [--config YAML | --resume RUN] [--FIELD VALUE ...]",
        description="Train a model and snapshot its biases at birth and at every checkpoint.",
    )
    pretrain.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the fields below.")
    pretrain.add_argument("--resume", type=str | None, metavar="RUN", help="Go on with the run in this folder.")
    pretrain.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    pretrain.add_class_arguments(RunConfig, None, as_group=False)
    commands.add_subcommand("pretrain", pretrain, help=pretrain.description)

    report = _Parser(description="Rebuild report.html of a run, or lay several runs side by side.")
    report.add_argument("runs", type=str, nargs="+", metavar="RUN", help="Folders that `pretrain` wrote.")
    report.add_argument(
        "--out", type=str | None, help="HTML file; by default RUN/report.html, ./report.html for several runs."
    )
    report.add_argument("--json", action="store_true", help="Print the figures as JSON; no page is written.")
    report.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("report", report, help=report.description)
    describe = _Parser(description="Tell what a model is made of, without allocating it.")
    describe.add_argument("config", type=str, metavar="CONFIG", help="YAML file of a run or of a model.")
    describe.add_argument("--json", action="store_true", help="Print it as JSON.")
    describe.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("describe", describe, help=describe.description)

    birth = _Parser(description="Re-create a birth from config and seed: its certificate and, if wanted, its weights.")
    birth.add_argument("config", type=str, metavar="CONFIG", help="YAML file of a run or of a model.")
    birth.add_argument("--seed", type=int | None, help="init_seed; by default the config's own.")
    birth.add_argument("--out", type=str | None, metavar="DIR", help="Folder for model.safetensors and birth.json.")
    birth.add_argument("--json", action="store_true", help="Print the certificate as JSON.")
    birth.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("birth", birth, help=birth.description)

    ablate = _Parser(description="Run a study: every arm from every seed, then one table and one figure.")
    ablate.add_argument("study", type=str, metavar="STUDY", help="YAML file of a study (docs/studies.md).")
    ablate.add_argument("--scale", type=str | None, metavar="NAME", help="One of the file's scales: another base.")
    ablate.add_argument("--out", type=str | None, metavar="DIR", help="By default studies/NAME or studies/NAME-SCALE.")
    ablate.add_argument("--arms", type=str | None, metavar="A,B", help="These arms alone; by default all.")
    ablate.add_argument(
        "--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help="Change the base of every arm."
    )
    ablate.add_argument("--jobs", type=int, default=1, metavar="N", help="Runs at a time; they share the cores.")
    ablate.add_argument("--summary", action="store_true", help="Run nothing: table and figure of what is there.")
    ablate.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    commands.add_subcommand("ablate", ablate, help=ablate.description)
    return parser, {"pretrain": pretrain, "report": report, "describe": describe, "birth": birth, "ablate": ablate}


def _check_config_files(arguments: Sequence[str]) -> None:
    """Refuse config files that the parser would misread: it takes a list or a word in place of a group for nothing."""
    names = [b for a, b in pairwise(arguments) if a == "--config"]
    names += [a.partition("=")[2] for a in arguments if a.startswith("--config=")]
    for name in names:
        try:
            content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--config {name}: cannot be read ({error.strerror})") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {name}: not YAML ({' '.join(str(error).split())})") from None
        _check_groups(name, content, RunConfig, "")


def _check_groups(file: str, content: Any, config: type, group: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {file}: {group or 'the file'} is {content!r}; write fields as `name: value` under it"
        )
    for field in dataclasses.fields(config):
        kind = field.default_factory
        if field.name in content and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _check_groups(file, content[field.name], kind, f"{group}.{field.name}".lstrip("."))


def _run_config(parser: ArgumentParser, parsed: Namespace) -> RunConfig:
    built = parser.instantiate(parsed)
    return RunConfig(**{f.name: built[f.name] for f in dataclasses.fields(RunConfig)})


def _pretrain(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from rich.console import Console

    from ..trainer.run import pretrain
    from .report import build_report
    from .table import print_table

    if parsed.resume is not None:
        if parsed.config:
            raise UsageError("--resume takes the config of the run itself: leave --config out, override single fields")
        run = RunDir.open(Path(parsed.resume))
        # The run's own config first, so that fields on the command line override it.
        parsed = parser.parse_args([f"--config={run.config}", *arguments])
        config = dataclasses.replace(_run_config(parser, parsed), run_dir=str(run.path))
    else:
        config = _run_config(parser, parsed)
        name = config.name or (Path(str(parsed.config[-1])).stem if parsed.config else "run")
        run = RunDir(Path(config.run_dir or f"runs/{name}"))
        config = dataclasses.replace(config, name=name, run_dir=str(run.path))

    console = Console()
    outcome = pretrain(config, run, resume=parsed.resume is not None, console=console)
    if config.snapshot.enabled:
        print_table(run, console)
    if importlib.util.find_spec("matplotlib"):
        build_report([run], run.report)
        console.print(f"report: {run.report}", highlight=False, soft_wrap=True)
    else:
        console.print(f"no report: pip install 'birthmark[plots]', then birthmark report {run.path}", soft_wrap=True)
    if outcome.stopped_by:
        console.print(
            f"stopped by {outcome.stopped_by} at step {outcome.step} of {config.trainer.max_steps}; "
            f"go on with: birthmark pretrain --resume {run.path}",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def _report(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .report import build_report, summarise

    runs = [RunDir.open(Path(path)) for path in parsed.runs]
    if parsed.json:
        print(json.dumps(summarise(runs), indent=2, ensure_ascii=False), flush=True)
        return 0
    out = Path(parsed.out) if parsed.out else runs[0].report if len(runs) == 1 else Path("report.html")
    build_report(runs, out)
    print(out)
    return 0


def resolve(file: Path, flags: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file and flags ``--field=value`` describe; what they leave out has its default."""
    _check_config_files(["--config", str(file)])
    parser = build_parser()[1]["pretrain"]
    return _run_config(parser, parser.parse_args([f"--config={file}", *flags]))


def _read_config(file: str) -> RunConfig:
    return resolve(Path(file))


def _ablate(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from rich.console import Console

    from .study import check_buildable, check_stored, common_flags, read_study, trials
    from .study_runs import run_trials
    from .study_table import read_results, report_study

    if parsed.jobs < 1:
        raise UsageError(f"--jobs {parsed.jobs}: give at least 1")
    study = read_study(Path(parsed.study)).at(parsed.scale)
    if parsed.arms is not None:
        study = study.only([arm.strip() for arm in parsed.arms.split(",")])
    out = Path(parsed.out or f"studies/{study.name}")
    planned = trials(study, out, resolve, common_flags(parsed["set"]))
    for trial in planned:
        check_stored(trial)
    console, failures = Console(), []
    if not parsed.summary:
        check_buildable(planned)
        failures = run_trials(planned, parsed.jobs, console)
    results = read_results(study, planned)
    if results:
        report_study(study, results, out, console)
    elif parsed.summary:
        raise UsageError(f"{out}: no run of {study.file} in it yet")
    for failure in failures:
        print(f"birthmark: error: {failure.trial.label}: {failure.reason} ({failure.trial.log})", file=sys.stderr)
    return 1 if failures else 0


def _birth(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from ..callbacks.records import atomic_path, write_json
    from ..models.birth import certificate_of
    from ..models.birth_files import write_birth
    from .describe import describe

    config = _read_config(parsed.config)
    seed = config.init_seed if parsed.seed is None else parsed.seed
    out = Path(parsed.out) if parsed.out else None
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists already; give a new folder")
    model = {"model": dataclasses.asdict(config.model)}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=parsed.json or not console.is_terminal) as progress:
        bar = progress.add_task("birth", total=describe(config.model)["n_params"])

        def advance(name: str, values: Any) -> None:
            progress.advance(bar, values.size)

        if out is None:
            told = certificate_of(config.model, seed, advance) | model
        else:
            with atomic_path(out) as new:
                new.mkdir()
                told = write_birth(config.model, seed, new, each=advance) | model
                write_json(new / "birth.json", told)
    if parsed.json:
        print(json.dumps(told, indent=2), flush=True)
    else:
        print(f"digest    {told['digest']}\ninit_seed {seed}\nn_params  {told['n_params']:,}", flush=True)
    return 0


def _describe(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from rich.console import Console

    from .describe import describe, print_description

    told = describe(_read_config(parsed.config).model)
    if parsed.json:
        print(json.dumps(told, indent=2), flush=True)
    else:
        print_description(told, Console())
    return 0


_COMMANDS: dict[str, Callable[[ArgumentParser, Sequence[str], Namespace], int]] = {
    "pretrain": _pretrain,
    "report": _report,
    "describe": _describe,
    "birth": _birth,
    "ablate": _ablate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 (it failed), 2 (it was asked wrongly), 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        _check_config_files(arguments)
        parser, commands = build_parser()
        parsed = parser.parse_args(arguments or ["--help"])
        return _COMMANDS[parsed.command](commands[parsed.command], arguments[1:], parsed[parsed.command])
    except (UsageError, RunError) as error:
        if debug:
            raise
        print(f"birthmark: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left must not fail again when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        print("birthmark: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        print(
            f"birthmark: {type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)", file=sys.stderr
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
