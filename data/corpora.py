"""Corpora: documents in a fixed order, each with a key that decides its split (`birthmark.data.documents`).

The key of a file is its path below the folder that was named (its own name, if the file itself was named); the key of a
table's row is its content.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from ..files import user_path
from .config import DataConfig
from .documents import SurveyedCorpus
from .row_corpora import HubCorpus, TableCorpus
from .suffixes import TABLE_SUFFIXES, TEXT_SUFFIXES, corpus_suffix, token_suffixes
from .text_files import FileCorpus, KeyedPath, keyed, unpacked, walk

_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__")
_COLUMNAR = (".parquet", ".arrow")


#: Source of documents: one of ``stdlib``, ``readmes``, ``files`` (`FileCorpus`), ``table`` and ``hub``.
Corpus = SurveyedCorpus


def open_corpus(config: DataConfig) -> Corpus:
    """Open the corpus that ``data.path`` names (all but ``backcopy``, which has no documents).

    A folder gives its text files; if it holds none, but tabular files of one kind, it gives those.

    Raises:
        UsageError: no files, kinds of files that do not mix, or one of several entries without files of the kind.
    """
    if problems := [problem for problem in config.problems() if problem.startswith("data.path")]:
        raise UsageError("; ".join(problems))
    if isinstance(config.path, str) and config.path in CORPORA:
        return FileCorpus(config.path, CORPORA[config.path](), config)
    if isinstance(config.path, str) and config.path.startswith("hf:"):
        return HubCorpus(config)

    found = {entry: _found(entry) for entry in config.entries}
    by_suffix = _each_once(found.values())
    texts = [suffix for suffix in by_suffix if suffix in TEXT_SUFFIXES]
    tables = [suffix for suffix in by_suffix if suffix in TABLE_SUFFIXES]
    census = _census(by_suffix)
    if texts and any(suffix in _COLUMNAR for suffix in tables):
        raise UsageError(f"data.path: {config.path!r} holds both text and tables ({census}); name the files meant")
    if texts:
        _check_all_read(found, texts)
        return FileCorpus("files", [file for suffix in texts for file in by_suffix[suffix]], config)
    if len(tables) == 1:
        _check_all_read(found, tables)
        cache_dir = config.cache_folder
        return TableCorpus(config, [unpacked(path, cache_dir) for _, path in by_suffix[tables[0]]])
    if by_suffix.keys() & {*token_suffixes()}:
        raise UsageError(f"data.path: {config.path!r} holds tokens ({census}) where text is asked for; name text")
    raise UsageError(
        f"data.path: {config.path!r} holds no {'/'.join(TEXT_SUFFIXES)} files and no one kind of tabular files "
        f"({'/'.join(TABLE_SUFFIXES)}); found {census}"
    )


def _stdlib() -> list[KeyedPath]:
    """List the modules of the running Python's standard library."""
    return walk(Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB).get(".py", [])


def _readmes() -> list[KeyedPath]:
    """List the metadata files of the installed packages, which end with their readme; a key is a package's name."""
    site = Path(sysconfig.get_paths()["purelib"])
    return [KeyedPath(file.parent.name.partition("-")[0], file) for file in site.glob("*.dist-info/METADATA")]


#: Files of the corpora that have names; the names stand in `birthmark.data.config.NAMED_CORPORA` too.
CORPORA: dict[str, Callable[[], list[KeyedPath]]] = {"stdlib": _stdlib, "readmes": _readmes}


def files_by_suffix(entries: list[str]) -> dict[str, list[KeyedPath]]:
    """Find all files that ``data.path`` names, each once even if both a folder and a file in it are named."""
    return _each_once(map(_found, entries))


def _found(entry: str) -> dict[str, list[KeyedPath]]:
    """Find the files of one entry, by suffix."""
    named = user_path(entry)
    return walk(named) if named.is_dir() else {corpus_suffix(named.name): [keyed(named.name, named)]}


def _each_once(found: Iterable[Mapping[str, list[KeyedPath]]]) -> dict[str, list[KeyedPath]]:
    by_suffix: dict[str, list[KeyedPath]] = {}
    seen: set[Path] = set()
    for of_entry in found:
        for suffix, files in of_entry.items():
            for file in files:
                if (resolved := file.path.resolve()) not in seen:
                    seen.add(resolved)
                    by_suffix.setdefault(suffix, []).append(file)
    return by_suffix


def _check_all_read(found: Mapping[str, Mapping[str, list[KeyedPath]]], suffixes: Sequence[str]) -> None:
    """Raise UsageError if an entry of ``data.path`` has no file of the kind that is read: it would be left out
    silently.
    """
    for entry, by_suffix in found.items():
        if not by_suffix.keys() & set(suffixes):
            raise UsageError(
                f"data.path: {entry!r} holds {_census(by_suffix)} beside {'/'.join(suffixes)} files; leave it out, or "
                "give it in data.sources"
            )


def _census(by_suffix: Mapping[str, list[KeyedPath]]) -> str:
    """Count the files of each suffix, in words."""
    return (
        ", ".join(f"{len(files)} {suffix or 'nameless'}" for suffix, files in sorted(by_suffix.items())) or "no files"
    )
