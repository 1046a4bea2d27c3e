"""The division of documents into training and validation, over all sources, without repeated evaluation texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RunError
from .cache import META, REBUILD, Meta, build_once, fingerprint, takes_files
from .config import DataConfig
from .corpora import Corpus
from .decontamination import CONTAMINATED, find_ngrams, without_ngrams
from .documents import OUT, TRAIN, VAL, WITHIN, SurveyedCorpus, below

# ---------------------------------------------------------------- held-out documents
# Validation documents that occur in no source's training documents, and counts of duplicates.
#
# In a mixture the text of a document decides its split, not its name: the same text then has the same split in every
# source. Texts are compared by 64-bit hashes; among 10⁹ texts, two share one by chance with a probability of 3 %.


def codes_by_content(corpora: Mapping[str, SurveyedCorpus], val_fraction: float) -> dict[str, np.ndarray]:
    """Return the code of each document's use for several corpora: uint8 ``[n]`` each (`birthmark.data.documents`).

    A text has one code in every source, and every source has training and validation. One that holds a single text,
    once or many times, gives the end of that text. One whose documents all fall on one side moves the nearest text that
    no source needs on its side; if there is none, the nearest of all is divided like a single text.
    """
    codes: dict[str, np.ndarray] = {}
    for name, corpus in corpora.items():
        corpus.check_any()
        codes[name] = np.where(corpus.sizes > 0, below(corpus.contents, val_fraction), OUT).astype(np.uint8)

    def only_text(name: str, code: int) -> np.ndarray:
        found = corpora[name].contents[codes[name] == code]
        return found[:1] if (found == found[:1]).all() else found[:0]

    def put(text: np.uint64, code: int) -> None:
        for name, of_source in codes.items():
            of_source[(corpora[name].contents == text) & (of_source != OUT)] = code

    def lacking(name: str) -> list[int]:
        return [] if (codes[name] == WITHIN).any() else [side for side in (TRAIN, VAL) if side not in codes[name]]

    # The sources' order decides nothing: texts that are alone go first, then sources in the order of their texts.
    one_sided = {name: np.unique(corpora[name].contents[codes[name] != OUT]) for name in codes if lacking(name)}
    for texts in one_sided.values():
        if len(texts) == 1:
            put(texts[0], WITHIN)
    for name in sorted(one_sided, key=lambda name: one_sided[name].tobytes()):
        for side in lacking(name):
            needed = [only_text(one, TRAIN + VAL - side) for one in codes if WITHIN not in codes[one]]
            free = np.setdiff1d(one_sided[name], np.concatenate(needed))
            nearest = free if len(free) else one_sided[name]
            put(nearest.min() if side == VAL else nearest.max(), side if len(free) else WITHIN)
    return codes


def duplicates(corpora: Mapping[str, SurveyedCorpus]) -> tuple[dict[str, int], int]:
    """Count documents whose text occurs earlier in their own source, by source; and surplus copies of texts across
    sources.

    The second number counts, for each text, the sources that hold it beyond the first.
    """
    texts = {name: np.unique(corpus.contents[corpus.sizes > 0]) for name, corpus in corpora.items()}
    within = {name: int((corpora[name].sizes > 0).sum()) - len(found) for name, found in texts.items()}
    if len(texts) < 2:
        return within, 0
    return within, sum(map(len, texts.values())) - len(np.unique(np.concatenate(list(texts.values()))))


# ---------------------------------------------------------------- splitting
# Division of documents into training and validation, over all sources of a run together.


class Divided(NamedTuple):
    """Corpora whose splits are decided, with the facts to report."""

    corpora: dict[str, Corpus]
    duplicates: dict[str, int]
    """Documents of each corpus whose text stands before them in the same one."""
    record: dict[str, Any]
    """Facts about all of them for a run's record."""


def divide(config: DataConfig, corpora: Mapping[str, Corpus]) -> Divided:
    """Decide the split of every document. A single corpus uses its own keys. In a mixture the text decides
    (`codes_by_content`). Training documents that repeat ``data.decontaminate`` are left out.

    Raises:
        UsageError: nothing is left, or there are no evaluation texts.
    """
    if not corpora:
        return Divided({}, {}, {})
    divided = dict(corpora)
    if len(config.sources) > 1:
        for name, codes in codes_by_content(corpora, config.val_fraction).items():
            divided[name] = corpora[name].with_codes(codes, {})
    within, across = _counted(config, corpora)
    record: dict[str, Any] = {"duplicates_across_sources": across} if config.sources else {}
    if config.decontaminate is not None:
        ngrams, facts = find_ngrams(config)
        record["decontaminate"] = facts
        divided = {name: without_ngrams(config, corpus, ngrams, name) for name, corpus in divided.items()}
    return Divided(divided, within, record)


def duplicates_in_words(record: Mapping[str, Any]) -> str:
    """Write one line for the start of a run about duplicates and omitted documents; empty if there are none."""
    sources = (record.get("sources") or {"": record}).values()
    again = sum(source.get("duplicates", 0) for source in sources)
    across = record.get("duplicates_across_sources", 0)
    dirty = sum((source.get("skipped") or {}).get(CONTAMINATED, 0) for source in sources)
    said = [f"{again:,} repeat an earlier one of their source"] if again else []
    said += [f"{across:,} texts stand in another source too"] if across else []
    if "decontaminate" in record:
        said.append(f"{dirty:,} repeat an evaluation text and are left out of the training")
    return f"documents: {'; '.join(said)}" if said else ""


class _CountMeta(Meta):
    within: dict[str, int]
    across: int


def _counted(config: DataConfig, corpora: Mapping[str, Corpus]) -> tuple[dict[str, int], int]:
    """Count duplicates; once for corpora that do not change."""
    cache_dir = config.cache_folder
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
