"""Locks of files between processes, which end with the process that holds them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from .errors import RunError

#: Reasons why a file system has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def hold_lock(path: Path | str, timeout: float = -1) -> Iterator[None]:
    """Hold the lock file ``path``, which ends with its process, within the context.

    Args:
        path: the lock file, in a folder that exists.
        timeout: seconds to wait for another process that holds it; by default without end.

    Raises:
        RunError: the file system has no locks.
        filelock.Timeout: another process held it for all of ``timeout``.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout)
    except OSError as error:
        # The system's refusal names no file.
        if error.errno not in _NO_LOCKS:
            raise
        raise RunError(
            f"{path}: cannot be locked ({error.strerror}); mount its file system with locks, or name another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()
