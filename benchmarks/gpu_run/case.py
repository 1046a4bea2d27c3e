"""Cases, each one measurement that yields its rows as it goes, and the process that runs a part's cases in turn."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from device import release
from record import FAILED, NOT_REACHED, Record, limit


@dataclass(frozen=True)
class Setting:
    """Device, size and deadline of a part."""

    device: str
    tiny: bool
    """A rehearsal: tiny shapes and two rounds."""
    deadline: float
    """Deadline on the clock of ``time.monotonic``: no case starts that would not be over by then."""

    arms: tuple[str, ...] = ("plain", "headnorm")
    """Arms of the study."""

    @property
    def rounds(self) -> int:
        """Number of rounds of measurements that take turns."""
        return 2 if self.tiny else 7

    def limit(self, value: float | None, bound: float, *, at_most: bool) -> dict[str, str]:
        """Return the columns of a limit; in a rehearsal the limit stays open."""
        return limit(None if self.tiny else value, bound, at_most=at_most)


@dataclass(frozen=True)
class Case:
    """One measurement."""

    name: str
    run: Callable[[Setting], Iterator[dict[str, Any]]]
    """Function that yields rows for the record: ``table``, then its columns."""
    seconds: float = 30.0
    """Seconds that it may take on an H100, cold: it is not started with less time left."""


class DeviceBrokenError(Exception):
    """The device no longer answers in this process."""


def run_cases(record: Record, part: str, cases: list[Case], setting: Setting, say: Callable[[str], None]) -> None:
    """Run the unfinished cases of a part. An error is a row, and the next case follows.

    Raises:
        DeviceBrokenError: an error of the device's own, after which this process can compute nothing there.
    """
    left = set(record.left(part))
    for number, case in enumerate(cases, 1):
        if case.name not in left:
            continue
        start = time.monotonic()
        if not setting.tiny and start + case.seconds > setting.deadline:
            say(f"{part} {number}/{len(cases)}: {case.name}: not reached")
            note = f"{max(setting.deadline - start, 0):.0f} s were left, it may take {case.seconds:.0f}"
            record.add(part, {"table": "", "case": case.name, "status": NOT_REACHED, "note": note})
            record.done(part, case.name)
            continue
        say(f"{part} {number}/{len(cases)}: {case.name} …")
        try:
            for row in case.run(setting):
                record.add(part, {"table": row.pop("table", ""), "case": case.name, **row})
        except Exception as error:
            say(f"{part}: {case.name} FAILED: {one_line(error)}")
            traceback.print_exc()
            record.add(part, failure(case.name, error))
            record.done(part, case.name)
            if breaks_device(error):
                raise DeviceBrokenError(one_line(error)) from error
        else:
            record.done(part, case.name)
        say(f"{part} {number}/{len(cases)}: {case.name}: {time.monotonic() - start:.0f} s")
        # Graphs and tensors of this case leave the device before the next one begins.
        torch._dynamo.reset()
        release(setting.device)


def one_line(error: BaseException) -> str:
    """Return the error's class and first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def failure(case: str, error: BaseException) -> dict[str, Any]:
    """Return the row of a case that failed."""
    trace = "".join(traceback.format_exception(error))[-4000:]
    return {"table": "", "case": case, "status": FAILED, "note": one_line(error), "trace": trace}


def breaks_device(error: BaseException) -> bool:
    """Say if the error leaves the device's context unusable, as an illegal access does; running out of memory
    does not.
    """
    broken = getattr(torch, "AcceleratorError", ())
    return not isinstance(error, torch.OutOfMemoryError) and (
        isinstance(error, broken) or "CUDA error" in str(error) or "device-side assert" in str(error)
    )
