"""Writing of checkpoints beside training: each rank writes its part, one rename ends it, and a thread does all but the
copy.

1. Training pauses while each rank copies its shards to the CPU.
2. In the background each writes ``tensors-RRRRR.safetensors`` into a hidden folder, and beside it a note with the
    file's checksum and content.
3. Rank 0's thread waits for all notes, writes ``state.json`` from them and renames the folder. No thread takes part in
    a collective: the ranks communicate through the file system.

A process that is killed at any time leaves a hidden folder, which the next run deletes, and the checkpoints before it.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...errors import RunError
from ...files import (
    SEEN_S,
    appears,
    atomic_path,
    file_sha256,
    make_folder,
    put_in_place,
    read_json,
    save_tensors,
    write_json,
)
from ...measure.ranks import from_rank_zero, rank, rank_on_host, world_size
from ...models.tensor_shards import Runs, TensorShard
from ..processes.joint_failure import raise_on_every_rank
from ..processes.process_group import TIMEOUT
from .state_file import STATE, part_name, piece_of, shape_and_dtype, state_content, tensor_index, to_json

# After a failure of the run: how long rank 0 still waits for the others' parts, which they had as long to write.
_GRACE = timedelta(seconds=10)
# Seconds between two checks for a part.
_SOON, _LATER = 0.02, 0.5


def _new_folder(path: Path) -> Path:
    """Make a hidden folder beside ``path``, with a name that no process of an earlier start can be writing to."""
    scratch = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        make_folder(path.parent)
        scratch.mkdir()
    except OSError as error:
        raise _unwritable(path, error) from error
    return scratch


def _unwritable(path: Path, error: object) -> RunError:
    return RunError(f"{path}: cannot be written ({error}); the checkpoints before it are intact")


def _is_held(shard: TensorShard) -> bool:
    """Return True if this rank writes a shard: one of its replicas does, and rank 0 writes a tensor without
    elements.
    """
    return shard.replica == 0 and (shard.start < shard.stop or (shard.numel == 0 and rank() == 0))


@dataclass(eq=False)
class _Write:
    """A checkpoint on its way to the disk, written by its own thread."""

    path: Path
    """The folder to come."""
    scratch: Path
    """The folder that becomes it."""
    step: int
    tree: Any
    facts: dict[str, dict[str, Any]]
    """Shape and type of every tensor."""
    places: dict[str, Runs]
    """Elements of the flattened whole in each part that this rank writes."""
    copies: dict[str, Tensor]
    """Copies of these parts, on the CPU once ``copied`` has returned."""
    copied: Callable[[], None]
    rank: int
    world_size: int
    patience: timedelta
    """Time that rank 0 waits for the others' parts."""
    then: Callable[[], None] | None
    """Function called when the folder is complete; it handles its own failures."""
    error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._written = threading.Event()
        self.hurry(self.patience)
        # A daemon: who presses Ctrl-C a second time wants out.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {self.path.name}", daemon=True)
        self._thread.start()

    def hurry(self, patience: timedelta) -> None:
        """Wait for the other ranks' parts no longer than ``patience`` from now."""
        self._waits_until = time.monotonic() + patience.total_seconds()

    def part_error(self) -> Exception | None:
        """Wait until this rank's part is written; return its error, if any."""
        self._written.wait()
        return self.error

    def join(self) -> Exception | None:
        """Wait until everything is written; return the error, if any."""
        self._thread.join()
        return self.error

    def drop(self) -> None:
        """Remove the files of an unfinished checkpoint."""
        if self.rank == 0:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _run(self) -> None:
        try:
            self.copied()
            own = self._write_part()
            self._written.set()
            if self.rank == 0:
                self._complete([own, *self._others()])
        except (OSError, SafetensorError) as error:
            self.error = _unwritable(self.path, error)
            self.error.__cause__ = error
        except Exception as error:
            self.error = error
        finally:
            self._written.set()
        # Whatever becomes of it, the checkpoint is there.
        if self.rank == 0 and self.error is None and self.then is not None:
            self.then()

    def _note(self, rank: int) -> Path:
        return self.scratch / f"{part_name(rank, self.world_size)}.json"

    def _write_part(self) -> dict[str, Any]:
        file = f"{part_name(self.rank, self.world_size)}.safetensors"
        part: dict[str, Any] = {"file": file, "sha256": None, "pieces": {}}
        # Else the file would be written into a new folder of this node, and rank 0 would wait for it in vain.
        if not appears(self.scratch, min(SEEN_S, self.patience.total_seconds())):
            raise RunError(
                f"{self.path}: {rank_on_host(self.rank)} does not see the folder that rank 0 has made; all nodes must "
                "see one file system; the checkpoints before it are intact"
            )
        if self.copies or self.world_size == 1:
            try:
                with atomic_path(self.scratch / file) as new:
                    save_tensors(save_file, self.copies, new)
            except RunError as error:  # a device that takes no more; it names a hidden file
                raise _unwritable(self.path, str(error).partition(": ")[2]) from error
            part["sha256"] = file_sha256(self.scratch / file)
            part["pieces"] = {name: piece_of(self.places[name]) for name in self.copies}
        if self.rank > 0:
            # The last thing that happens here: as soon as rank 0 sees it, the folder may have another name.
            unseen = self._note(self.rank).with_suffix(".unseen")
            unseen.write_text(json.dumps(part), encoding="utf-8")
            unseen.replace(self._note(self.rank))
        return part

    def _others(self) -> list[dict[str, Any]]:
        """Return the other ranks' notes about their parts, once all have written."""
        parts: list[dict[str, Any]] = []
        pause = _SOON
        for other in range(1, self.world_size):
            while not (note := self._note(other)).is_file():
                # A thread that hurries this one brings the end closer meanwhile.
                if time.monotonic() > self._waits_until:
                    raise RunError(
                        f"{self.path}: rank {other} of {self.world_size} has not written its part in time; all nodes "
                        "must see one file system; the checkpoints before it are intact"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LATER)
            parts.append(read_json(note))
        return parts

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        tensors = tensor_index(self.facts, parts)
        files = {part["file"]: part["sha256"] for part in parts if part["sha256"] is not None}
        write_json(self.scratch / STATE, state_content(self.step, files, tensors, self.tree))
        for other in range(1, self.world_size):
            self._note(other).unlink()
        put_in_place(self.scratch, self.path)


class BackgroundWriter:
    """Writer of checkpoints, one at a time.

    Args:
        asynchronous: if :meth:`save` returns as soon as the tensors are copied; else when the folder is complete.
        timeout: longest time that rank 0 waits for the other ranks' parts.
    """

    def __init__(self, *, asynchronous: bool = False, timeout: timedelta = TIMEOUT) -> None:
        self.asynchronous, self.timeout = asynchronous, timeout
        self.on_complete: Callable[[], None] | None = None
        """Function called by the process that completes a checkpoint, in the thread that writes it; it handles its own
        failures.
        """
        self._writing: _Write | None = None
        # Kept from one checkpoint to the next: fresh memory costs many times the copy.
        self._buffers: dict[str, Tensor] = {}

    def save(self, checkpoint: dict[str, Any], path: Path, *, shared: bool) -> None:
        """Begin to write ``path`` once the previous one is done.

        Args:
            checkpoint: plain data with tensors, DTensors and shards in it, of the same form on all ranks; it must have
                a ``global_step``.
            path: the folder to come, the same on all ranks; one that stands there is replaced.
            shared: if all ranks call, each with its shards; else the only caller has the whole model.

        Raises:
            RunError: the checkpoint before, or without ``asynchronous`` this one, could not be written.
            TypeError: something is neither a tensor nor plain data; nothing is written.
        """
        finish = self.finish if shared else self._finish_alone
        finish()
        found: dict[str, TensorShard] = {}
        tree = to_json(checkpoint, "", found)
        mine = {name: piece for name, piece in found.items() if not shared or _is_held(piece)}
        copies, copied = self._copy(mine)
        self._writing = _Write(
            path,
            from_rank_zero(lambda: _new_folder(path)) if shared else _new_folder(path),
            step=checkpoint["global_step"],
            tree=tree,
            facts={name: shape_and_dtype(piece) for name, piece in found.items()},
            places={name: piece.runs for name, piece in mine.items()},
            copies=copies,
            copied=copied,
            rank=rank() if shared else 0,
            world_size=world_size() if shared else 1,
            patience=self.timeout,
            then=self.on_complete,
        )
        if not self.asynchronous:
            finish()

    def _copy(self, pieces: dict[str, TensorShard]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return copies on the CPU that later steps leave unchanged, and a function that waits for them."""
        buffers: dict[str, Tensor] = {}
        device: torch.device | None = None
        for name, piece in pieces.items():
            local, buffer = piece.local, self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            # Into pinned memory this only queues the copy; training's changes of the tensor are queued behind it.
            buffers[name] = buffer.copy_(local, non_blocking=local.is_cuda)
            device = local.device if local.is_cuda else device
        self._buffers = buffers
        # Whole tensors are written in their shape, so that any reader of safetensors finds them as they are.
        copies = {n: b.view(pieces[n].shape) if b.numel() == pieces[n].numel else b for n, b in buffers.items()}
        if device is None:
            return copies, lambda: None
        return copies, torch.cuda.current_stream(device).record_event().synchronize

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete. Collective: call on every rank.

        Raises:
            RunError: the checkpoint could not be written; raised on all ranks.
        """
        writing, self._writing = self._writing, None
        try:
            # First the parts: rank 0 must not wait for one that will not come.
            raise_on_every_rank(writing.part_error() if writing is not None else None)
            raise_on_every_rank(writing.join() if writing is not None else None)
        except Exception:
            if writing is not None:
                writing.hurry(timedelta(0))
                writing.join()
                writing.drop()
            raise

    def _finish_alone(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing.join()) is not None:
            writing.drop()
            raise error

    def settle(self, error: BaseException) -> None:
        """Complete the checkpoint in progress after a failure of the run, if that is still possible.

        Nothing is raised, and no other rank need be alive; a further failure becomes a note of ``error``.
        """
        writing, self._writing = self._writing, None
        if writing is None or isinstance(error, KeyboardInterrupt):
            return
        writing.hurry(_GRACE)
        if (failure := writing.join()) is not None:
            writing.drop()
            error.add_note(str(failure))

    def teardown(self) -> None:
        """Wait for unfinished writes of this process, if nothing else has: see :meth:`finish`."""
        self._finish_alone()
