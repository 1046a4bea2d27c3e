"""`birthmark ablate` of a study of lineage: its runs, then what goes on from them, then every test."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console

from ...errors import UsageError
from ...report.terminal import bar
from ...trainer.config_file import resolve
from ..runner import Failure, run_trials
from ..trials import check_buildable, check_stored, common_flags
from .file import read_lineage
from .results import probes, read_rows
from .table import report_lineage
from .trials import members, plan


def lineage(parsed: Namespace) -> list[Failure]:
    """Bring every run to its last step, test all pairs of models, and write what came out; runs that failed."""
    if parsed.arms is not None:
        raise UsageError(f"--arms {parsed.arms}: a study of lineage has none; leave it out")
    study = read_lineage(Path(parsed.study)).at(parsed.scale)
    out = Path(parsed.out or f"studies/{study.name}")
    planned = plan(study, out, resolve, common_flags(parsed["set"]))
    for trial in planned.bases:
        check_stored(trial)
    console = Console()
    failures: list[Failure] = []
    if not parsed.summary:
        check_buildable(planned.bases)
        failures = run_trials(planned.bases, parsed.jobs, console)
        ready = planned.ready()
        for trial in ready:
            check_stored(trial)
        failures += run_trials(ready, parsed.jobs, console)
    models = members(planned)
    if not models and parsed.summary:
        raise UsageError(f"{out}: no run of {study.file} in it yet")
    if models:
        n_passes = len(models) * len(probes(planned.study))
        with bar("hidden states", n_passes, quiet=False) as advance:
            rows = read_rows(planned.study, models, Path(planned.bases[0].config.data.cache_dir), advance)
        report_lineage(planned.study, rows, out, console)
    return failures
