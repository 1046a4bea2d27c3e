"""`birthmark report`: the page of runs over training, or of one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...files import find_folder
from ...measure.records import RunDir
from ...trainer.config_parser import Parser

SUMMARY = "Write the page of a run, of several side by side, or of one snapshot."


def add_options(parser: Parser) -> None:
    """What to show, and where to."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        metavar="RUN",
        help="Folders that `pretrain` or a callback wrote, or one of `snapshot --out`.",
    )
    parser.add_argument("--step", type=int | None, metavar="N", help="The page of this snapshot of the run alone.")
    parser.add_argument(
        "--out",
        type=str | None,
        help="HTML file; by default RUN/report.html, in the snapshot's folder, or ./report.html for several runs.",
    )
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON; no page is written.")


def run(options: Namespace) -> int:
    """Write a page, or print its figures."""
    from ...report.run_page import build_report, summarise
    from ...report.snapshot_page import build_snapshot_page
    from ...report.terminal import print_json

    folder = _one_snapshot([Path(path) for path in options.runs], options.step)
    out = None if options.out is None else Path(options.out)
    if folder is not None:
        if options.json:
            print_json(_figures(folder))
        else:
            print(build_snapshot_page(folder, out))
        return 0
    runs = [RunDir.open_measured(Path(path)) for path in options.runs]
    if options.json:
        print_json(summarise(runs))
        return 0
    out = out or (runs[0].report if len(runs) == 1 else Path("report.html"))
    build_report(runs, out)
    print(out)
    return 0


def _one_snapshot(paths: Sequence[Path], step: int | None) -> Path | None:
    """The folder of the one snapshot that is meant; None if runs are."""
    from ...report.snapshot_page import find_snapshot

    alone = [path for path in paths if (find_folder(path) / "summary.json").is_file() and not RunDir.is_run(path)]
    if alone and len(paths) > 1:
        raise UsageError(f"{alone[0]}: a snapshot has a page of its own; give it alone, or give runs")
    if step is None:
        return alone[0] if alone else None
    if alone:
        raise UsageError(f"--step {step}: {alone[0]} is one snapshot; leave --step out")
    if len(paths) > 1:
        raise UsageError(f"--step {step}: a page shows one snapshot; give one run")
    return find_snapshot(RunDir.open_measured(paths[0]), step)


def _figures(folder: Path) -> dict[str, object]:
    """What `birthmark snapshot --json` prints of a snapshot."""
    from ...measure.records import Snapshot
    from ...report.block_table import figures

    return figures(Snapshot.read(folder))
