"""What each command does. Frameworks are imported where they are used, so that --help is quick."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from ...errors import UsageError
from ...measure.records import RunDir
from ...trainer.config_file import resolve, run_config


def _pretrain(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from rich.console import Console

    from ...report.run_page import build_report
    from ...report.tables import print_table
    from ...trainer import initial_weights as start
    from ...trainer.processes import place, restarted
    from ...trainer.run import pretrain

    if parsed.resume is not None:
        if parsed.config:
            raise UsageError("--resume takes the config of the run itself: leave --config out, override single fields")
        run = RunDir.open(Path(parsed.resume))
        # The run's own config first, so that fields on the command line override it.
        parsed = parser.parse_args([f"--config={run.config}", *arguments])
        config = dataclasses.replace(run_config(parser, parsed), run_dir=str(run.path))
    else:
        config = run_config(parser, parsed)
        name = config.name or (Path(str(parsed.config[-1])).stem if parsed.config else "run")
        run = RunDir(Path(config.run_dir or f"runs/{name}"))
        config = dataclasses.replace(config, name=name, run_dir=str(run.path))

    config = start.adopted(config)
    console = Console()
    # The launcher's command is the one that began the run.
    resume = parsed.resume is not None or (restarted() and RunDir.is_run(run.path))
    where = place()
    outcome = pretrain(config, run, resume=resume, console=console)
    if where is not None and where.rank > 0:
        return 0
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
    from .report import report

    return report(parsed)


def _ablate(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .ablate import ablate

    return ablate(parsed)


def _birth(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from ...files import atomic_path, write_json
    from ...models.birth import certificate_of
    from ...models.birth_files import write_birth
    from ...plan.describe import describe
    from ...report.terminal import bar, print_json

    config = resolve(Path(parsed.config))
    seed = config.init_seed if parsed.seed is None else parsed.seed
    out = Path(parsed.out) if parsed.out else None
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists already; give a new folder")
    model = {"model": dataclasses.asdict(config.model)}
    with bar("birth", describe(config.model)["n_params"], quiet=parsed.json) as advance:

        def each(name: str, values: Any) -> None:
            advance(values.size)

        if out is None:
            told = certificate_of(config.model, seed, each) | model
        else:
            with atomic_path(out) as new:
                new.mkdir()
                told = write_birth(config.model, seed, new, each=each) | model
                write_json(new / "birth.json", told)
    if parsed.json:
        print_json(told)
    else:
        print(f"digest    {told['digest']}\ninit_seed {seed}\nn_params  {told['n_params']:,}", flush=True)
    return 0


def _sample(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .sample import sample

    for name, least in (("max_tokens", 1), ("temperature", 0), ("top_k", 1)):
        if parsed[name] is not None and not parsed[name] >= least:
            raise UsageError(f"--{name} {parsed[name]}: give at least {least}")
    run = RunDir.open(Path(parsed.run))
    pieces = sample(
        run,
        resolve(run.config).model,
        parsed.prompt,
        n_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        seed=parsed.seed,
        step=parsed.step,
    )
    first = next(pieces, "")  # nothing is told of a command that fails
    print(parsed.prompt + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    return 0


def _export(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    import torch

    from .export import export

    run = RunDir.open(Path(parsed.run))
    dtype = None if parsed.dtype is None else getattr(torch, parsed.dtype)
    notes = export(run, resolve(run.config).model, Path(parsed.out), step=parsed.step, dtype=dtype)
    print("\n".join([parsed.out, *notes]))
    return 0


def _describe(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from rich.console import Console

    from ...plan.describe import describe, print_description
    from ...report.terminal import print_json

    told = describe(resolve(Path(parsed.config)).model)
    if parsed.json:
        print_json(told)
    else:
        print_description(told, Console())
    return 0


def _plan(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .plan import plan_run

    return plan_run(parsed)


def _fingerprint(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .fingerprint import fingerprint

    return fingerprint(parsed)


def _identify(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .fingerprint import identification

    return identification(parsed)


def _snapshot(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .snapshot import snapshot

    return snapshot(parsed)


def _intervene(parser: ArgumentParser, arguments: Sequence[str], parsed: Namespace) -> int:
    from .intervene import intervention

    return intervention(parsed)


#: Commands by name: (their parser, the arguments after the name, those parsed) → exit status.
COMMANDS: dict[str, Callable[[ArgumentParser, Sequence[str], Namespace], int]] = {
    "pretrain": _pretrain,
    "report": _report,
    "describe": _describe,
    "plan": _plan,
    "birth": _birth,
    "ablate": _ablate,
    "fingerprint": _fingerprint,
    "identify": _identify,
    "snapshot": _snapshot,
    "intervene": _intervene,
    "sample": _sample,
    "export": _export,
}
