"""What `birthmark report` does: the page of runs over training, or of one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...files import strict
from ...measure.records import RunDir, Snapshot
from ...report.run_page import build_report, summarise
from ...report.snapshot_page import build_snapshot_page, find_snapshot
from ...report.terminal import print_json


def report(parsed: Namespace) -> int:
    """Write a page, or print its figures."""
    folder = _one_snapshot([Path(path) for path in parsed.runs], parsed.step)
    out = None if parsed.out is None else Path(parsed.out)
    if folder is not None:
        if parsed.json:
            print_json(_told(folder))
        else:
            print(build_snapshot_page(folder, out))
        return 0
    runs = [RunDir.open_measured(Path(path)) for path in parsed.runs]
    if parsed.json:
        print_json(summarise(runs))
        return 0
    out = out or (runs[0].report if len(runs) == 1 else Path("report.html"))
    build_report(runs, out)
    print(out)
    return 0


def _one_snapshot(paths: Sequence[Path], step: int | None) -> Path | None:
    """The folder of the snapshot that a page was asked of; None if it was asked of runs."""
    alone = [path for path in paths if (path / "summary.json").is_file() and not RunDir.is_run(path)]
    if alone and len(paths) > 1:
        raise UsageError(f"{alone[0]}: a snapshot has a page of its own; give it alone, or give runs")
    if step is None:
        return alone[0] if alone else None
    if alone:
        raise UsageError(f"--step {step}: {alone[0]} is one snapshot; leave --step out")
    if len(paths) > 1:
        raise UsageError(f"--step {step}: a page shows one snapshot; give one run")
    return find_snapshot(RunDir.open_measured(paths[0]), step)


def _told(folder: Path) -> dict[str, object]:
    """What `birthmark snapshot --json` tells of a snapshot."""
    from .snapshot import layers

    snapshot = Snapshot.read(folder)
    told = {name: value for name, value in snapshot.summary.items() if name != "bias"}
    return strict(told | {"scalars": snapshot.bias, "layers": layers(snapshot)})
