"""Corpora in stores, as paths on this machine: copies, and pointers to files that are read in blocks.

A copy is tied to the URL and the store's facts about the file (size, ETag, time of the last change): when they change,
it is made again. It is checked against the promised size, and appears whole or not at all. Each node has it once, in
``data.cache_dir``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import UsageError
from .cache import build_once, facts_of_files, fingerprint
from .config import DataConfig, is_remote
from .remote import Found, Store, name_of
from .stored_files import point_to
from .suffixes import TABLE_SUFFIXES, TOKEN_FILES, corpus_suffix

#: Files that are asked for together.
_AT_ONCE = 16


def localised(config: DataConfig) -> DataConfig:
    """Copy all remote paths of a config; return it with paths on this machine.

    With ``data.cache_gb``, pointers are made in place of copies of token files.

    Raises:
        UsageError: no such file, no access, or a protocol without its package; one line with the URL. Or no tokens,
            where ``data.cache_gb`` is given.
        RunError: the download hangs, or fails three times; the message is one line with the URL.
    """

    reach = fetched if config.cache_gb is None else pointed

    def path(named: Any) -> Any:
        if isinstance(named, list):
            return [path(one) for one in named]
        return str(reach(named, config)) if isinstance(named, str) and is_remote(named) else named

    sources = [replace(source, path=path(source.path), val_path=path(source.val_path)) for source in config.sources]
    # Their names come from their paths, which are others now.
    named = [replace(new, name=old.label) for new, old in zip(sources, config.sources, strict=True)]
    return replace(
        config,
        path=path(config.path),
        val_path=path(config.val_path),
        tokenizer=str(fetched(config.tokenizer, config)) if is_remote(config.tokenizer) else config.tokenizer,
        sources=named,
    )


def fetched(url: str, config: DataConfig) -> Path:
    """Copy a remote file or folder and return the copy's path; see `localised`."""
    store = Store(url, config.timeout_s)
    files = store.files()
    cache_dir = config.cache_folder
    copies = [_copied(store, found, cache_dir, config.verify) for found in files]
    if len(files) == 1 and not url.endswith("/"):
        return copies[0]
    # Files of one remote folder are found in one local folder.
    there = fingerprint(copies=[str(copy.absolute()) for copy in copies], keys=[found.key for found in files])
    folder = cache_dir / f"linked-{there[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        for found, copy in zip(files, copies, strict=True):
            link = store.below(scratch / "files", found.key, nested=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(copy.absolute())
        return {"files": {}}

    build_once(folder, build)
    return _named(store, folder / "files")


def _named(store: Store, files: Path) -> Path:
    """Return what the store's URL names, of the folder of its files."""
    single = name_of(store.url) if not store.url.endswith("/") else ""
    file = store.below(files, single) if single else files
    return file if file.is_file() else files


def pointed_tables(urls: Sequence[str], config: DataConfig) -> list[Path]:
    """Make a pointer to each of these tables, a file each, which then are read through ``data.cache_gb``.

    Raises:
        UsageError, RunError: see `localised`.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(lambda url: pointed(url, config, TABLE_SUFFIXES), urls))


def pointed(url: str, config: DataConfig, suffixes: Collection[str] = ()) -> Path:
    """Make pointers to the files with these suffixes below a URL, and copies of the others; see `localised`.

    Without suffixes they are those of tokens.
    """
    assert config.cache_gb is not None
    store = Store(url, config.timeout_s, insists=True)
    files = store.files()
    suffixes = suffixes or dict.fromkeys(suffix for kind in TOKEN_FILES.values() for suffix in kind.tokens)
    in_blocks = [found for found in files if corpus_suffix(found.key) in suffixes]
    if not in_blocks:
        raise UsageError(
            f"data.cache_gb: {url}: no files of tokens there ({', '.join(suffixes)}), which alone are read in blocks; "
            "tokenise text before, with birthmark tokenise, or read tables with data.stream"
        )
    identities = {found.key: _identity(store, found) for found in files}
    most = int(config.cache_gb * 1e9)
    key = fingerprint(url=url, files=identities, cache_bytes=most, timeout_s=config.timeout_s, format=1)
    folder = config.cache_folder / f"stored-{key[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        def place(found: Found) -> None:
            to = store.below(scratch / "files", found.key, nested=True)
            to.parent.mkdir(parents=True, exist_ok=True)
            if found in in_blocks:
                point_to(store, found, identities[found.key], most, to)
            else:
                store.copy(found, to)

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(place, files))
        return {"files": {}}

    build_once(folder, build)
    return _named(store, folder / "files")


def _identity(store: Store, found: Found) -> str:
    return fingerprint(url=found.path, protocol=store.protocol, said=found.said, format=1)


def _copied(store: Store, found: Found, cache_dir: Path, verify: str) -> Path:
    name = PurePosixPath(found.key).name
    folder = cache_dir / f"remote-{_identity(store, found)[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        store.copy(found, store.below(scratch, name))
        return {"files": facts_of_files(scratch)}

    copy = store.below(folder, name)
    build_once(folder, build, verify)
    return copy
