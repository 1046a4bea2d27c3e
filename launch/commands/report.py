"""`birthmark report`: the page of runs over training, as a file or live, or of one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser

SUMMARY = "Write the page of a run, of several side by side, or of one snapshot."

#: Reason for the message about a name that is no run.
_NEED = "a page shows what was measured in a run"


def add_options(parser: Parser) -> None:
    """Add the options for the runs to show and the output."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        metavar="RUN",
        help="Runs, by the folders that `pretrain` or a callback wrote; or one snapshot: RUN@STEP, or a folder of "
        "`snapshot --out`.",
    )
    parser.add_argument("--step", type=int | None, metavar="N", help="The page of this snapshot of the run alone.")
    parser.add_argument(
        "--out",
        type=str | None,
        help="HTML file; by default RUN/report.html, in the snapshot's folder, or ./report.html for several runs.",
    )
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON; no page is written.")
    parser.add_argument(
        "--watch", action="store_true", help="Serve the page of runs that go on, on this machine; it follows them."
    )
    parser.add_argument("--port", type=int | None, metavar="N", help="Where --watch serves it; by default a free port.")


def run(options: Namespace) -> int:
    """Write a page, serve it, or print its figures."""
    from rich.console import Console

    from ...report.csv_files import data_folder
    from ...report.run_page import build_pages, compared_in_words, summarise
    from ...report.snapshot_page import build_snapshot_page
    from ...report.snapshot_table import print_runs
    from ...report.terminal import out_file, print_json, print_written, say
    from ...trainer.by_name.name_grammar import whole_run

    if options.watch:
        return _watch(options.runs, options)
    if options.port is not None:
        raise UsageError(f"--port {options.port}: only --watch has one; give both, or leave it out")
    folder = _one_snapshot(options.runs, options.step)
    out = None if options.out is None else out_file(options.out, "page")
    if folder is not None:
        if options.json:
            print_json(_figures(folder))
        else:
            print(build_snapshot_page(folder, out))
        return 0
    runs = [whole_run(name, _NEED) for name in options.runs]
    if options.json:
        print_json(summarise(runs))
        return 0
    out = out or (runs[0].report if len(runs) == 1 else Path("report.html"))
    histories = build_pages(runs, out)
    console = Console(stderr=True)
    print_runs(histories, console)
    for sentence in compared_in_words(histories):
        say(console, sentence, wrapped=True)
    print_written("numbers of its pictures", data_folder(out))
    print(out)
    return 0


def _watch(names: Sequence[str], options: Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from ...report.live import HOST, LivePage, LiveServer
    from ...trainer.by_name.name_grammar import whole_run

    for name, given in (("step", options.step), ("out", options.out), ("json", options.json or None)):
        if given is not None:
            raise UsageError(f"--{name}: --watch serves the page of whole runs; leave either out")
    if options.port is not None and not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port {options.port}: give a number from 1 to 65535")
    runs = [whole_run(name, "a live page shows whole runs") for name in names]
    with LiveServer(LivePage(runs), options.port) as server:
        # Not before the port is there: a page of many runs takes a while.
        server.page.draw()
        print(f"live at http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            # The way to end it. The terminal's line ends after its ^C.
            print()
    return 0


def _one_snapshot(names: Sequence[str], step: int | None) -> Path | None:
    """Return the folder of the one snapshot that the arguments mean; None if they mean runs."""
    from ...report.snapshot_page import find_snapshot
    from ...trainer.by_name.name_grammar import read_name, whole_run

    found = [read_name(name) for name in names]
    alone = next((one for one in found if one.is_one_snapshot), None)
    if alone is not None and len(names) > 1:
        raise UsageError(f"{alone.text}: a snapshot has a page of its own; give it alone, or give runs")
    if alone is not None and step is not None:
        raise UsageError(f"--step {step}: {alone.text} is one snapshot; leave --step out")
    if alone is not None:
        return alone.path if alone.number is None else find_snapshot(alone.run, alone.number, alone.text)
    if step is None:
        return None
    if len(names) > 1:
        raise UsageError(f"--step {step}: a page shows one snapshot; give one run")
    return find_snapshot(whole_run(names[0], _NEED), step, f"--step {step}")


def _figures(folder: Path) -> dict[str, object]:
    """Return the figures of a snapshot as `birthmark snapshot --json` prints them."""
    from ...measure.records import Snapshot
    from ...report.block_table import figures

    return figures(Snapshot.read(folder))
