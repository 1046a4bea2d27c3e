"""Run of one part in this process: from its name to its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import machine
from record import FAILED, Record

from .case import DeviceBrokenError, Setting, failure, run_cases
from .plan import cases_of
from .processes import BROKEN


def record_of(device: str, out: Path) -> Record:
    """Return the record of this card in the folder ``out``."""
    name = machine.device_name(device)
    return Record(out / f"gpu-{machine.slug(name)}", f"{name}: the answers of `make gpu`")


def run_part(part: str, setting: Setting, record: Record, say: Callable[[str], None], go_on: str | None = None) -> int:
    """Run a part's cases; return 0, 1 if one failed, or :data:`~gpu_run.processes.BROKEN` if the device broke and cases
    are left.

    Args:
        part: name of the part.
        setting: device, size and deadline.
        record: record that gets the rows.
        say: function that prints a line.
        go_on: None for a fresh start. Else the part continues after a process that ended, and this says why: after an
            end in the middle of a case, that case counts as failed.
    """
    if go_on is None:
        record.begin(part, f"make gpu PART={part}", machine.describe(setting.device), [])
    elif go_on:
        lost = next(iter(record.left(part)), "the part itself")
        record.add(part, {"table": "", "case": lost, "status": FAILED, "note": go_on})
        record.done(part, lost)
    try:
        cases = cases_of(part, setting)
    except Exception as error:
        record.add(part, failure("the part itself", error))
        say(f"{part} FAILED: {error}")
        return 1
    record.parts[part]["cases"] = [case.name for case in cases]
    record.write()
    try:
        run_cases(record, part, cases, setting, say)
    except DeviceBrokenError:
        return BROKEN
    failures = record.failures(part)
    say(f"{part}: {len(failures)} failed; {record.md_file}")
    return 1 if failures else 0
