"""`birthmark verify`: a checkpoint against a certificate."""

from __future__ import annotations

from jsonargparse import Namespace

from ...errors import UsageError
from ...messages import for_terminal
from ...trainer.config_parser import Parser
from ..options import MODEL_NAMES, WRONG, add_json, check_seed

SUMMARY = "Check whether a certificate lists a checkpoint, and whether that descends from the seed it commits to."


def add_options(parser: Parser) -> None:
    """Add the options for the certificate, the checkpoint and the revealed seed."""
    parser.add_argument(
        "certificate", type=str, metavar="CERT", help="File that `certify` wrote, or a run that has one."
    )
    parser.add_argument("checkpoint", type=str, metavar="MODEL", help=MODEL_NAMES[0].upper() + MODEL_NAMES[1:] + ".")
    parser.add_argument(
        "--reveal", type=int | None, metavar="SEED", help="The run's init_seed, with --salt or --secret."
    )
    parser.add_argument("--salt", type=str | None, metavar="HEX", help="The salt of the run's secret.")
    parser.add_argument(
        "--secret", type=str | None, metavar="FILE", help="The run's certificate.secret.json: salt and data order."
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Verify a checkpoint."""
    from ...audit.certificate import read_secret, salt_of
    from ...audit.certificate_check import Reveal, as_json, lines, verify
    from ...files import user_path
    from ...measure.records import RunDir
    from ...report.terminal import print_json

    reveal = None
    if options.reveal is not None:
        check_seed("reveal", options.reveal)
    if options.reveal is None:
        if given := [name for name in ("salt", "secret") if options[name] is not None]:
            raise UsageError(f"--{given[0]}: opens nothing without its seed; give --reveal SEED too")
    elif (options.salt is None) == (options.secret is None):
        raise UsageError(
            f"--reveal {options.reveal}: a commitment opens with its salt; give one of --salt and --secret"
        )
    elif options.salt is not None:
        reveal = Reveal(options.reveal, salt_of(options.salt, "--salt"))
    else:
        secret = read_secret(user_path(options.secret))
        reveal = Reveal(options.reveal, salt_of(secret["salt"], "--secret"), secret["data_order"])
    file = user_path(options.certificate)
    if RunDir.is_run(file) and not RunDir(file).certificate.exists():
        raise UsageError(f"{file}: a run without a certificate; birthmark certify {file} writes it")
    found = verify(RunDir(file).certificate if RunDir.is_run(file) else file, options.checkpoint, reveal)
    if options.json:
        print_json(as_json(found))
    else:
        print(for_terminal("\n".join(lines(found))), flush=True)
    return 0 if found.holds else WRONG
