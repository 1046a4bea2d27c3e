"""`birthmark certify`: a statement of a run's checkpoints that commits to its seed without showing it."""

from __future__ import annotations

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser
from ..options import add_json

SUMMARY = "Write a run's certificate: digests of its checkpoints, and commitments to its seed (docs/audit.md)."


def add_options(parser: Parser) -> None:
    """Add the options that name the run and the file of the certificate."""
    parser.add_argument("run", type=str, metavar="RUN", help="Folder that `pretrain` wrote.")
    parser.add_argument(
        "--out", type=str | None, metavar="FILE", help="The certificate; by default RUN/certificate.json."
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Certify a run."""
    from ...audit.certificate import SECRET, state, write_statement
    from ...files import user_path
    from ...measure.records import RunDir
    from ...report.terminal import bar, print_json, print_written
    from ...trainer.by_name.name_grammar import whole_run

    named = whole_run(options.run, "a certificate lists all checkpoints of a run")
    found = RunDir.open(named.path)
    out = found.certificate if options.out is None else user_path(options.out)
    if out.exists():
        raise UsageError(f"{out}: exists already; give --out another name, so that what was published stays")
    with bar("checkpoints", len(found.checkpoints()), quiet=options.json) as advance:
        statement = state(found, advance)
    digest = write_statement(out, statement)
    if options.json:
        print_json(statement | {"sha256": digest})
        return 0
    steps = [one["step"] for one in statement["checkpoints"]]
    which = f" (step {steps[0]} to {steps[-1]})" if len(steps) > 1 else ""
    print(f"statement   {digest}")
    print(f"checkpoints {len(steps)}{which}")
    print(f"keep secret {found.path / SECRET}", flush=True)
    print_written("publish", out)
    return 0
