"""Torture of inputs and of kills, so many of each or for so many minutes.

``make torture CASES=5000 KILLS=200 SEED=7`` runs so many; ``make torture MINUTES=10`` divides the time over both. With
``--out FILE`` notes are kept in ``FILE.inputs.json`` and ``FILE.kills.json``, from which a run that was ended goes on.
``--part 1/2`` and ``--part 2/2`` run every other one, side by side, one on each processor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import randrange

import devices
from record import Record, circumstances, opened
from sandbox import in_memory

KINDS = ("inputs", "kills")


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: write 1/2 or 2/2")
    return int(number), int(parts)


def _numbers(record: Record, wanted: int | None, minutes: float, part: tuple[int, int]) -> Iterator[int]:
    """Yield the numbers of this part that are not done, so many or for so long."""
    done, end = set(record.done), time.monotonic() + 60 * minutes
    for number in count(part[0] - 1, part[1]):
        if (number >= wanted) if wanted is not None else (time.monotonic() >= end):
            return
        if number not in done:
            yield number


def main() -> int:
    """Run them; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="Over all kinds, where no number is given.")
    parser.add_argument("--cases", type=int, help="Inputs.")
    parser.add_argument("--kills", type=int, help="Runs that are killed.")
    parser.add_argument("--seed", type=int, default=None, help="By default another each time; it is printed.")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="N/M", help="Every M-th, from the N-th on.")
    parser.add_argument("--out", type=Path, help="Files of notes, from which it goes on.")
    options = parser.parse_args()
    if options.seed is None:
        # The process that is started anew goes on with the same seed.
        options.seed = randrange(1 << 32)
        sys.argv += ["--seed", str(options.seed)]
    devices.preload()
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    wanted = {"inputs": options.cases, "kills": options.kills}
    given = any(n is not None for n in wanted.values())
    chosen = [kind for kind in KINDS if options.only in (None, kind) and (not given or wanted[kind])]
    about = circumstances(options.part)
    print(f"seed {options.seed}, {' and '.join(chosen)}, commit {about['commit']}", flush=True)
    records = {}
    for kind in chosen:
        file = options.out and options.out.with_name(f"{options.out.name}.{kind}.json")
        record = opened(file, options.seed, about)
        numbers = _numbers(record, wanted[kind], options.minutes / len(chosen), options.part)
        if kind == "inputs":
            from inputs import run_cases

            with tempfile.TemporaryDirectory(dir=in_memory()) as root:
                run_cases(Path(root), options.seed, numbers, record)
        else:
            from kills import run_trials

            run_trials(options.seed, numbers, record)
        record.write()
        records[kind] = record
    for kind, record in records.items():
        print(f"{kind}: {record.in_words()}, {record.seconds:.0f} s")
    return int(any(record.findings for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
