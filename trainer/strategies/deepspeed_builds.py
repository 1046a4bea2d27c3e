"""DeepSpeed's operators, compiled on first use: builds are announced, and dead builds are not waited for."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from filelock import FileLock

#: About how long each takes to compile on one core, in minutes, by DeepSpeed's name.
MINUTES = {"deepspeed_shm_comm": 1, "async_io": 3}


def _say(line: str) -> None:
    print(f"birthmark: {line}", file=sys.stderr, flush=True)


def _held(lock: Path) -> bool:
    """Return True if a build may be running: a visible process has the lock open, or this process cannot tell.

    Torch's lock is a file that exists while a build runs, open in the process that builds; a killed one leaves it.
    """
    facts = lock.stat()
    if facts.st_uid != os.getuid() or not Path("/proc/self/fd").is_dir():
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            its = descriptor.stat()
        except OSError:  # gone by now, or another user's
            continue
        if (its.st_dev, its.st_ino) == (facts.st_dev, facts.st_ino):
            return True
    return False


def load_operator(builder: Any) -> None:
    """Load one of DeepSpeed's operators, building it if needed. DeepSpeed itself then finds it loaded.

    Processes do so one after another, under a lock that ends with its process, so that the lock that torch's own
    builds leave when they are killed can be told from that of a build that runs.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(builder.name, False))
    with FileLock(f"{folder}.birthmark.lock"):
        lock = folder / "lock"
        if lock.exists() and _held(lock):
            _say(f"waiting for another process that builds DeepSpeed's {builder.name}; if none does, delete {lock}")
        elif lock.exists():
            lock.unlink()
            _say(f"{lock}: left by a build that was killed; removed")
        if not (folder / f"{builder.name}.so").is_file():
            minutes = MINUTES.get(builder.name, max(MINUTES.values()))
            _say(f"building DeepSpeed's {builder.name} in {folder}, this once: about {minutes} min")
        # It prints its actions.
        with redirect_stdout(io.StringIO()):
            builder.load(verbose=False)
