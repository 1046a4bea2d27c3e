"""A run's checkpoints in a store without rename, copied there beside training: ``trainer.checkpoint_to``.

The store gets the run's folder: its small files, and of every checkpoint first the tensors, then ``state.json``, the
index. A checkpoint without an index is none. A thread of the process that writes checkpoints does all of this once a
checkpoint is complete on the disk; training waits for nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...callbacks.checkpoint import kept
from ...data.remote import Store
from ...errors import UsageError
from ...findings.formatting import in_few_words
from ...measure.records import RunDir, is_step, step_of
from .state_file import STATE

#: Seconds without a sign of life after which a request to a store is given up. A part of an object may take minutes.
SILENCE_S = 300.0
#: Seconds until a store that failed is tried again: at first, and at most.
_SOON_S, _LATER_S = 30.0, 600.0
#: Seconds that a run which failed waits for its last checkpoint to be copied.
_GRACE_S = 60.0


def checkpoint_key(step: int, file: str = "") -> str:
    """Return the key of a checkpoint's file in the store of its run."""
    return f"{RunDir(Path()).checkpoint(step).as_posix()}/{file}"


def steps_in(found: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the keys of a store by the step of the checkpoint that they belong to, oldest first."""
    steps: dict[int, list[str]] = {}
    for key in found:
        kind, _, rest = key.partition("/")
        folder = Path(rest.partition("/")[0])
        if kind == "checkpoints" and is_step(folder) and "/" in rest:
            steps.setdefault(step_of(folder), []).append(key)
    return dict(sorted(steps.items()))


def small_files(run: RunDir) -> dict[str, Path]:
    """Return the files of a run beside its checkpoints, by their keys in a store."""
    files = [file for file in run.files if file.is_file()]
    files += [file for folder in run.snapshot_folders() for file in sorted(folder.rglob("*")) if file.is_file()]
    return {file.relative_to(run.path).as_posix(): file for file in files}


class Uploader:
    """Copier of a run's checkpoints to a store, in a thread.

    Args:
        run: the run.
        url: its folder in the store.
        keep_last, keep_every: see :func:`~birthmark.callbacks.checkpoint.kept`; for the store as for the disk.
        say: called with a line for each failure, from the thread.

    Raises:
        UsageError: a protocol that is unknown, or whose package is missing.
    """

    def __init__(
        self,
        run: RunDir,
        url: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self.run, self.keep_last, self.keep_every, self.say = run, keep_last, keep_every, say
        self.store = Store(url, SILENCE_S, "trainer.checkpoint_to", "")
        self.busy: Path | None = None
        """Checkpoint that is being copied, which must stay on the disk."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of change of the small files that are in the store, by key."""
        self._whole: set[int] = set()
        """Steps of the checkpoints that are whole in the store, as they are on the disk."""
        self._said = ""
        self._ending = False
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    # ---------------------------------------------------------------- in the training's threads

    def check(self) -> None:
        """Check, before anything that takes long, that the store can be read.

        Raises:
            UsageError, RunError: it cannot.
        """
        self.store.listed()

    def begin(self, step: int) -> None:
        """Check the store once more before the first step, copy the small files, and start the thread.

        Args:
            step: step that the run starts from.

        Raises:
            UsageError: the store needs credentials or refuses them, it is of another run, or ahead of this one.
            RunError: it does not answer, or fails.
        """
        found, url = self.store.listed(), self.store.url
        there = self.store.read(self.run.birth.name) if self.run.birth.name in found else None
        if there is not None and _run_id(there) != _run_id(self.run.birth.read_bytes()):
            raise UsageError(f"trainer.checkpoint_to: {url} holds another run; give a folder of its own")
        ahead = [at for at, keys in steps_in(found).items() if at > step and checkpoint_key(at, STATE) in keys]
        if ahead:
            raise UsageError(
                f"trainer.checkpoint_to: {url} has a checkpoint of step {ahead[-1]}, later than {step}, from which "
                f"{self.run.path} goes on: give --resume {url}, or delete what is later there"
            )
        for key in found:
            kind, _, rest = key.partition("/")
            folder = Path(rest.partition("/")[0])
            if kind == "snapshots" and is_step(folder) and step_of(folder) > step:
                self.store.remove(key)
        self._send_small()
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Ask the thread to copy what is new. It costs the caller nothing."""
        self._wanted.set()

    def finish(self, error: BaseException | None = None) -> None:
        """Wait for the last copies, and say which are missing.

        Args:
            error: failure of the run, after which it waits for a minute at most; for a second Ctrl-C not at all.
        """
        if not self._thread.is_alive() or isinstance(error, KeyboardInterrupt):
            return
        self._ending = True
        self.wake()
        self._thread.join(None if error is None else _GRACE_S)
        missing = sorted(self._local().keys() - self._whole)
        if missing:
            steps = in_few_words([str(step) for step in missing])
            self.say(
                f"{self.store.url}: lacks the checkpoints of steps {steps}, which are in {self.run.path}; going on "
                "with the run copies them"
            )

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        pause: float | None = None
        while True:
            self._wanted.wait(pause)
            self._wanted.clear()
            ending = self._ending
            later = min(2 * pause, _LATER_S) if pause else _SOON_S
            pause = None if self._succeeds() else later
            if ending:
                return

    def _succeeds(self) -> bool:
        """Bring the store up to date; say once what keeps it from being so."""
        try:
            self.update()
        except Exception as error:  # the training must not end for it
            if (line := str(error)) != self._said:
                self._said = line
                self.say(f"{line}; the checkpoints are on the disk, the run goes on and tries again")
            return False
        self._said = ""
        return True

    def update(self) -> None:
        """Copy what the store lacks, the newest checkpoint first, and delete what is not kept.

        Raises:
            UsageError, RunError: the store fails.
        """
        self._send_small()
        while (step := next((s for s in reversed(self._local()) if s not in self._whole), None)) is not None:
            self.busy = self.run.checkpoint(step)
            try:
                self._send(step)
            except Exception:
                # It may have been deleted in favour of a later one.
                if (self.busy / STATE).is_file():
                    raise
            finally:
                self.busy = None
        self._delete_old()

    def _local(self) -> dict[int, Path]:
        """Return the checkpoints that are whole on the disk and belong into the store, oldest first."""
        there = {s: folder for s, folder in self.run.checkpoints_by_step().items() if (folder / STATE).is_file()}
        return {s: there[s] for s in sorted(kept([*there], self.keep_last, self.keep_every))}

    def _send_small(self) -> None:
        for key, file in small_files(self.run).items():
            facts = file.stat()
            state = (facts.st_size, facts.st_mtime_ns)
            if self._sent.get(key) != state:
                # Read at once: the log grows meanwhile.
                self.store.put(key, file.read_bytes())
                self._sent[key] = state

    def _send(self, step: int) -> None:
        """Copy a checkpoint, its index last."""
        folder, index = self.run.checkpoint(step), checkpoint_key(step, STATE)
        content = (folder / STATE).read_bytes()
        if self.store.read(index) != content:
            self.store.remove(index)
            for name in json.loads(content)["files"]:
                self.store.put(checkpoint_key(step, name), folder / name)
            self._send_small()
            self.store.put(index, content)
        self._whole.add(step)

    def _delete_old(self) -> None:
        """Delete checkpoints that are not kept, the index first; and parts of those that never became whole."""
        found = self.store.listed()
        by_step, local = steps_in(found), self._local()
        whole = [step for step, keys in by_step.items() if checkpoint_key(step, STATE) in keys]
        stay = kept(whole, self.keep_last, self.keep_every) | local.keys()
        for step in by_step.keys() - stay:
            for key in sorted(by_step[step], key=lambda key: key != checkpoint_key(step, STATE)):
                self.store.remove(key)


def _run_id(birth: bytes) -> Any:
    try:
        record = json.loads(birth)
    except ValueError:
        return None
    return record.get("run_id") if isinstance(record, dict) else None
