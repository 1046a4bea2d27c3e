"""A part in a process of its own: watched, ended when its time is over, started again if its device broke."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping

#: Exit status of a process whose device answers no more; another one goes on with the cases that are left.
BROKEN = 75
#: Seconds of a part: no case begins that would not be over by then; and the part is killed after so many more.
BUDGET, GRACE = 460.0, 60.0
#: Processes of one part, at most.
_STARTS = 12


def run_watched(
    command: list[str], environment: Mapping[str, str], say: Callable[[str], None], budget: float = BUDGET
) -> int:
    """Run a part to its end; return its exit status.

    A process that crashes or is killed is followed by one that records this and goes on with the next case; if no
    time is left, that one records the other cases as not reached.

    Args:
        command: command that starts the part. It gets ``--deadline``, on the clock of ``time.monotonic``, and after a
            start ``--go-on`` with the reason why the process before it ended.
        environment: environment of the processes.
        say: function that prints a line.
        budget: seconds for all cases.
    """
    deadline, more, status = time.monotonic() + budget, [], 1
    for _ in range(_STARTS):
        process = subprocess.Popen([*command, f"--deadline={deadline}", *more], env=dict(environment))
        try:
            # A process that begins after the deadline only reports the cases not reached.
            status = process.wait(max(deadline + GRACE - time.monotonic(), GRACE))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            why = f"killed: not over {GRACE:.0f} s after the part's {budget:.0f} s"
        else:
            if status in (0, 1, 2):
                return status
            why = "" if status == BROKEN else f"its process ended with status {status}"
        say(f"starting anew: {why or 'the device broke'}")
        more = [f"--go-on={why}"]
    return status or 1
