"""`birthmark audit`: is every checkpoint of a suite what it says it is?"""

from __future__ import annotations

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser
from ..options import WRONG, add_json

SUMMARY = "Check whether the checkpoints of a suite are what they say they are (docs/audit.md)."


def add_options(parser: Parser) -> None:
    """Add the options that name the suite and limit how much of it is read."""
    parser.add_argument(
        "suite",
        type=str,
        nargs="+",
        metavar="SUITE",
        help="A run or a folder of checkpoints, whole; or a model by any of its names, with commas between steps or "
        "revisions, RUN@STEP,STEP. Several make one suite.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Read a thousandth of the weights alone: finds no single value that was changed.",
    )
    parser.add_argument("--out", type=str | None, metavar="HTML", help="Write it as a page too.")
    add_json(parser)


def run(options: Namespace) -> int:
    """Audit a suite."""
    from rich.console import Console

    from ...audit.audit import audit
    from ...audit.checkpoint import find_members, listed_but_absent
    from ...audit.report import as_json, print_audit, write_audit_page
    from ...findings.formatting import shorten
    from ...report.terminal import bar, out_file, print_json, print_written

    page = None if options.out is None else out_file(options.out, "page")
    members = find_members(options.suite)
    if len(members) < 2:
        raise UsageError(f"{options.suite[0]}: one checkpoint is no suite; give at least two")
    with bar("checkpoints", len(members), quiet=options.json, then="judging") as advance:
        found = audit(members, scan=not options.quick, advance=advance, absent=listed_but_absent(options.suite))
    if options.json:
        print_json(as_json(found))
    else:
        print_audit(found, Console())
    if page is not None:
        write_audit_page(page, " · ".join(shorten(name, 60) for name in options.suite[:3]), found)
        print_written("page", page)
    return 0 if found.is_right else WRONG
