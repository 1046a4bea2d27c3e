"""Runs in a store, named by their URL wherever a run is named: what a command reads is copied into a cache first.

The small files are copied at once. A checkpoint gets a folder with the store's URL alone, and its files when it is
opened (:class:`~birthmark.trainer.checkpoints.stored_tensors.CheckpointFolder`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from ...data.cache import fingerprint
from ...data.config import DataConfig
from ...data.remote import Found, Store
from ...errors import RunError, UsageError
from ...files import (
    atomic_path,
    content_digest,
    delete_folder,
    make_folder,
    parse_json,
    read_json,
    user_path,
    write_json,
)
from ...locks import hold_lock
from ...measure.records import RunDir
from ...urls import keep_credentials, without_credentials
from ..saved_config import read_saved_fields
from .state_file import STATE
from .upload import SILENCE_S, checkpoint_key, steps_in

#: File of a checkpoint's folder that names the store of its run.
ORIGIN = "store.json"
_MEND = "delete the folder"  # of the checkpoint, which is then copied again
#: File of the cache with the facts of the store about the files in it.
_FETCHED = ".fetched.json"
#: A run in a store, and what may follow a run's name.
_NAME = re.compile(r"(?P<url>[A-Za-z][A-Za-z0-9+.-]*://.+?)/*(?P<rest>(@[0-9]+)?(@(ema|mean[0-9]+))?)")


class _Origin(TypedDict):
    """Content of :data:`ORIGIN`."""

    url: str
    index: NotRequired[dict[str, str]]
    """Facts of the store about the checkpoint's index. Earlier versions wrote none."""


def run_here(name: str, into: Path | None = None) -> str:
    """Return a name on this machine for a run in a store.

    Args:
        name: the run's URL, perhaps with ``@STEP``, ``@ema`` or ``@meanK`` behind it.
        into: folder for the run; by default one of the cache.

    Raises:
        UsageError: the URL holds no run, the store needs credentials or refuses them, or ``into`` holds another run.
        RunError: the store fails, or the index of its last checkpoint names files that are not there.
    """
    named = _NAME.fullmatch(keep_credentials(name))
    folder = None if named is None else fetch_run(named["url"], into)
    if named is None or folder is None:
        raise UsageError(f"{without_credentials(name)}: holds no run (no config.yaml and birth.json there)")
    return f"{folder}{named['rest']}"


def url_of_run(name: str) -> str:
    """Return the URL of the run in a name that :func:`run_here` takes, without credentials."""
    named = _NAME.fullmatch(keep_credentials(name))
    return name if named is None else named["url"]


def fetch_run(url: str, into: Path | None = None) -> Path | None:
    """Copy a run's small files, and make folders for its checkpoints; None if the URL holds no run.

    Args:
        url: folder of the run in the store.
        into: folder in which the run goes on; as long as it is as far as the store, its files stay. By default a folder
            of the cache, which becomes what the store is.

    Raises:
        UsageError: another process is writing the run in ``into``.
    """
    store = Store(url, SILENCE_S, "run", "")
    found = store.listed()
    if not {"config.yaml", "birth.json"} <= found.keys():
        return None
    url = store.url
    goes_on = into is not None
    if into is None:
        cache = user_path(DataConfig.cache_dir)
        into = cache / f"run-{fingerprint(url=url)[:16]}" / (url.rstrip("/").rpartition("/")[2] or "run")
    make_folder(into.parent)
    with hold_lock(into.parent / f".{into.name}.fetching"):
        _check_same_run(store, into)
        origins = _origins(store, found)
        with RunDir(into).claimed() if goes_on else nullcontext():
            _delete_abandoned(origins, into)
            is_behind = max(RunDir(into).checkpoints_by_step(), default=0) < max(origins, default=0)
            _copy_small(store, found, into, keep=goes_on and not is_behind)
            _make_folders(origins, into)
    return into


def _check_same_run(store: Store, into: Path) -> None:
    run = RunDir(into)
    if not into.exists() or all(file == run.lock for file in into.iterdir()):
        return
    birth = parse_json((store.read(run.birth.name) or b"null").decode())
    if not run.birth.is_file() or run.read_birth().get("run_id") != birth.get("run_id"):
        raise UsageError(f"{into}: holds something else than the run at {store.url}; give another --run_dir")


def _is_small(key: str) -> bool:
    # Earlier versions copied the secret of a certificate into stores.
    kept_back = key.startswith("checkpoints/") or key.endswith(".secret.json")
    return not kept_back and not any(part.startswith(".") for part in key.split("/"))


def _copy_small(store: Store, found: Mapping[str, Found], into: Path, *, keep: bool) -> None:
    """Copy files that are new in the store, or with ``keep`` those alone that are missing here."""
    facts = {key: one.said for key, one in found.items() if _is_small(key)}
    noted = into / _FETCHED
    had = read_json(noted, dict[str, dict[str, str]], "delete it") if noted.is_file() else {}
    had = {key: said for key, said in had.items() if _is_small(key)}
    for key, now in facts.items():
        file = store.below(into, key, nested=True)
        if (had.get(key) != now and not keep) or not file.is_file():
            with atomic_path(file) as new:
                store.copy(found[key], new)
            had[key] = now
    for key in had.keys() - facts.keys() if not keep else ():
        store.below(into, key, nested=True).unlink(missing_ok=True)
        del had[key]
    write_json(noted, had)


def _origins(store: Store, found: Mapping[str, Found]) -> dict[int, _Origin]:
    """Return the facts of the checkpoints that are whole in the store, by step."""
    by_step = steps_in(found)
    whole = [step for step, keys in by_step.items() if checkpoint_key(step, STATE) in keys]
    # On a store without atomic writes the last index may be cut off by a kill. It is none then.
    while whole and _index(store, whole[-1]) is None:
        whole.pop()
    if whole:
        index = _index(store, whole[-1])
        assert index is not None
        _check_names(store, whole[-1], index, by_step[whole[-1]])
    return {step: {"url": store.url, "index": found[checkpoint_key(step, STATE)].said} for step in whole}


def _delete_abandoned(origins: Mapping[int, _Origin], into: Path) -> None:
    """Delete the folders of checkpoints that the store has no longer, or has replaced.

    A run that goes on from an earlier step replaces later ones. Checkpoints that a resumed run wrote itself stay.
    """
    for step, folder in RunDir(into).checkpoints_by_step().items():
        if (folder / ORIGIN).is_file() and read_json(folder / ORIGIN, _Origin, _MEND) != origins.get(step):
            delete_folder(folder)


def _make_folders(origins: Mapping[int, _Origin], into: Path) -> None:
    """Make folders for the checkpoints that are whole in the store."""
    for step, origin in origins.items():
        folder = RunDir(into).checkpoint(step)
        if not folder.exists():
            with atomic_path(folder) as new:
                new.mkdir()
                write_json(new / ORIGIN, origin)


def _index(store: Store, step: int) -> dict[str, Any] | None:
    """Read the index of a checkpoint; None if it is missing or damaged."""
    content = store.read(checkpoint_key(step, STATE))
    try:
        index = parse_json((content or b"").decode())
    except ValueError:
        return None
    if not isinstance(index, dict):
        return None
    rest = {name: value for name, value in index.items() if name != "sha256"}
    return index if index.get("sha256") == content_digest(rest) and isinstance(index.get("files"), dict) else None


def _check_names(store: Store, step: int, index: Mapping[str, Any], keys: Sequence[str]) -> None:
    for name in index["files"]:
        if checkpoint_key(step, name) not in keys:
            raise RunError(
                f"{store.url}/{checkpoint_key(step, STATE)}: names {name}, which is not there; delete this file to go "
                "on from the checkpoint before it"
            )


def fetch_checkpoint(folder: Path) -> None:
    """Copy the files of a checkpoint whose folder names a store, unless they are there; its index comes last.

    Raises:
        RunError: the store has it no longer, or lacks a file that its index names.
    """
    if not (folder / ORIGIN).is_file() or (folder / STATE).is_file():
        return
    origin: _Origin = read_json(folder / ORIGIN, _Origin, _MEND)
    store, step = Store(origin["url"], SILENCE_S, "run", ""), int(folder.name.removeprefix("step-"))
    with hold_lock(folder / ".fetching"):
        if (folder / STATE).is_file():
            return
        keys, index = steps_in(found := store.listed()).get(step, []), _index(store, step)
        if index is None:
            raise RunError(f"{store.url}/{checkpoint_key(step)}: is there no longer, or damaged; name another step")
        _check_names(store, step, index, keys)
        for name in index["files"]:
            with atomic_path(store.below(folder, name)) as new:
                store.copy(found[checkpoint_key(step, name)], new)
        with atomic_path(folder / STATE) as new:
            store.copy(found[checkpoint_key(step, STATE)], new)


def resumed_here(url: str, run_dir: str | None) -> Path:
    """Copy a run of a store into the folder in which it goes on, and return that.

    Args:
        url: the run in the store.
        run_dir: the folder; by default the one that the run's config names.

    Raises:
        UsageError, RunError: see :func:`run_here`.
    """
    if run_dir is None:
        fields = read_saved_fields(RunDir(Path(run_here(url))))
        run_dir = str(fields["run_dir"] or f"runs/{fields['name'] or 'run'}")
    return Path(run_here(url, user_path(run_dir)))
