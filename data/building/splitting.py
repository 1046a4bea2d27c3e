"""Division of documents into training and validation, over all sources of a run together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import RunError, UsageError
from ...files import user_path
from ..cache import META, REBUILD, Meta, build_once, facts_of_files, fingerprint, takes_files
from ..config import DataConfig
from ..corpora import Corpus, open_corpus
from ..ingest.remote import localised
from ..splits import OUT, TRAIN, WITHIN
from ..survey.decontamination import NGrams, Searched, holds_ngrams
from ..survey.held_out import codes_by_content, duplicates
from .workers import in_processes, n_cores

_PIECE_BYTES = 1 << 24
_CONTAMINATED = "contaminated"


class Divided(NamedTuple):
    """Corpora whose splits are decided, with the facts to report."""

    corpora: dict[str, Corpus]
    duplicates: dict[str, int]
    """Documents of each corpus whose text stands before them in the same one."""
    record: dict[str, Any]
    """Facts about all of them for a run's record."""


def divide(config: DataConfig, corpora: Mapping[str, Corpus]) -> Divided:
    """Decide the split of every document. A single corpus uses its own keys. In a mixture the text decides
    (`birthmark.data.survey.held_out`). Training documents that repeat ``data.decontaminate`` are left out.

    Raises:
        UsageError: nothing is left, or there are no evaluation texts.
    """
    if not corpora:
        return Divided({}, {}, {})
    divided = dict(corpora)
    if len(config.sources) > 1:
        for name, codes in codes_by_content(corpora, config.val_fraction).items():
            corpus = corpora[name]
            elsewhere = int(((codes == OUT) & (corpus.sizes > 0)).sum())
            divided[name] = corpus.with_codes(codes, {"only text of another source": elsewhere} if elsewhere else {})
    within, across = _counted(config, corpora)
    record: dict[str, Any] = {"duplicates_across_sources": across} if config.sources else {}
    if config.decontaminate is not None:
        ngrams, facts = _ngrams(config)
        record["decontaminate"] = facts
        divided = {name: _cleaned(config, corpus, ngrams, name) for name, corpus in divided.items()}
    return Divided(divided, within, record)


def told(record: Mapping[str, Any]) -> str:
    """Write one line for the start of a run about duplicates and omitted documents; empty if there are none."""
    sources = (record.get("sources") or {"": record}).values()
    again = sum(source.get("duplicates", 0) for source in sources)
    across = record.get("duplicates_across_sources", 0)
    dirty = sum((source.get("skipped") or {}).get(_CONTAMINATED, 0) for source in sources)
    said = [f"{again:,} repeat an earlier one of their source"] if again else []
    said += [f"{across:,} texts stand in another source too"] if across else []
    if "decontaminate" in record:
        said.append(f"{dirty:,} repeat an evaluation text and are left out of the training")
    return f"documents: {'; '.join(said)}" if said else ""


class _CountMeta(Meta):
    within: dict[str, int]
    across: int


class _NGramsMeta(Meta):
    n_grams: int


def _counted(config: DataConfig, corpora: Mapping[str, Corpus]) -> tuple[dict[str, int], int]:
    """Count duplicates; once for corpora that do not change."""
    cache_dir = user_path(config.cache_dir)
    hashes = {name: corpus.content_hash() for name, corpus in corpora.items()}
    folder = cache_dir / f"duplicates-{fingerprint(content_hashes=hashes, format=1)[:16]}"
    if not folder.is_dir() and not takes_files(cache_dir):
        return duplicates(corpora)

    def build(_: Path) -> dict[str, Any]:
        within, across = duplicates(corpora)
        return {"within": within, "across": across, "files": {}}

    meta = build_once(folder, build, schema=_CountMeta)
    if meta["within"].keys() != corpora.keys():
        raise RunError(f"{folder / META}: damaged (within is not of this run's sources); {REBUILD}")
    return meta["within"], meta["across"]


def evaluation_texts(config: DataConfig) -> tuple[Corpus, str]:
    """Open the texts of ``data.decontaminate``, which must be set, all in one split, with the hash of their content.

    Raises:
        UsageError: the texts cannot be read;  the message names the field.
    """
    path = config.decontaminate
    assert path is not None
    asked = DataConfig(path=path, text_field=config.text_field, cache_dir=config.cache_dir, timeout_s=config.timeout_s)
    try:
        corpus = open_corpus(localised(asked))
        content_hash = corpus.content_hash()
        return corpus.with_codes(np.where(corpus.sizes > 0, TRAIN, OUT).astype(np.uint8), {}), content_hash
    except UsageError as error:
        raise UsageError(str(error).replace("data.path", "data.decontaminate")) from error


def _ngrams(config: DataConfig) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the n-grams of the evaluation texts, and facts about them for the record."""
    n, path = config.decontaminate_ngram, config.decontaminate
    whole, content_hash = evaluation_texts(config)

    def build(scratch: Path) -> dict[str, Any]:
        found = NGrams.of(whole.documents(), n)
        if not len(found):
            raise UsageError(
                f"data.decontaminate: no text of {path!r} has {n} words; give longer ones, or a smaller "
                "data.decontaminate_ngram"
            )
        found.save(scratch)
        return {"n_grams": len(found), "files": facts_of_files(scratch)}

    folder = user_path(config.cache_dir) / f"ngrams-{fingerprint(content_hash=content_hash, n=n, format=1)[:16]}"
    meta = build_once(folder, build, schema=_NGramsMeta)
    return folder, {"content_hash": content_hash, "ngram": n, "n_grams": meta["n_grams"]}


def _cleaned(config: DataConfig, corpus: Corpus, ngrams: Path, name: str) -> Corpus:
    """Remove the training documents that hold an n-gram from a corpus."""
    searched = np.where((corpus.codes == TRAIN) | (corpus.codes == WITHIN), TRAIN, OUT).astype(np.uint8)
    key = fingerprint(
        content_hash=corpus.content_hash(),
        searched=corpus.splits_key,
        val_fraction=config.val_fraction,
        ngrams=ngrams.name,
        format=1,
    )

    def build(scratch: Path) -> dict[str, Any]:
        pieces = corpus.with_codes(searched, {}).pieces(_PIECE_BYTES)
        jobs = [Searched(piece, ngrams, config.decontaminate_ngram) for _, piece in pieces]
        found = dict(in_processes(holds_ngrams, jobs, config.n_workers or n_cores()))
        holds = [held for number in range(len(jobs)) for held in found[number]]
        np.save(scratch / "documents.npy", np.flatnonzero(searched == TRAIN)[np.array(holds, dtype=bool)])
        return {"files": facts_of_files(scratch)}

    folder = user_path(config.cache_dir) / f"{_CONTAMINATED}-{key[:16]}"
    build_once(folder, build)
    documents = np.load(folder / "documents.npy")
    if not len(documents):
        return corpus
    codes = corpus.codes.copy()
    codes[documents] = OUT
    if not ((codes == TRAIN) | (codes == WITHIN)).any():
        raise UsageError(
            f"data.decontaminate: every training document of {name or 'the corpus'} repeats an evaluation text; give "
            "other text, or a larger data.decontaminate_ngram"
        )
    return corpus.with_codes(codes, corpus.left_out | {_CONTAMINATED: len(documents)})
