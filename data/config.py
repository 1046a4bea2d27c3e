"""Where tokens come from, as a config."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..files import user_path
from ..schema import SEEDS, outside
from .mixing.config import WeightChange, schedule_problems

TEXT_SUFFIXES = (".txt", ".md", ".py")
"""Files that are one document each."""

NAMED_CORPORA = ("stdlib", "readmes")
"""Names of ``data.path`` that stand for text found on this machine; `birthmark.data.corpora.CORPORA` opens them."""

TABLE_SUFFIXES = (".parquet", ".arrow", ".json", ".jsonl", ".csv")
"""Files whose rows are documents; read through ``datasets``."""


@dataclass(frozen=True)
class SourceConfig:
    """One of several corpora that a run reads in asked shares."""

    path: str | list[str]
    """What ``data.path`` takes, but for ``backcopy``."""

    weight: float | None = None
    """Share of the training tokens, relative to the weights of the others; without any weights, shares follow the
    sources' sizes. 0: read by ``schedule`` alone."""

    name: str = ""
    """What curves and messages call it; by default the last part of its path."""

    text_field: str = "text"
    """Column that holds the text, for ``hf:`` and tabular corpora."""

    @property
    def label(self) -> str:
        """Its name, given or from its path."""
        first = self.path if isinstance(self.path, str) else (self.path or [""])[0]
        return self.name or Path(first.rpartition(":")[2]).stem or first


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and the order of the training data."""

    path: str | list[str] = "stdlib"
    """Corpus: ``stdlib`` (source text of the running Python's standard library), ``readmes`` (what the packages
    installed beside this one say of themselves, mostly English prose), ``backcopy`` (the bigram-backcopy task), one or
    more .txt/.md/.py files or folders, ``hf:NAME[:CONFIG]`` (anything that ``datasets`` loads), or one or more local
    .parquet/.arrow/.json/.jsonl/.csv files of one kind."""

    sources: list[SourceConfig] = field(default_factory=list)
    """In place of ``path``: corpora that are read in the shares of their weights, ``[{path: …, weight: .7, name: web},
    …]``. All share one tokenizer; each keeps documents of its own for validation."""

    schedule: list[WeightChange] = field(default_factory=list)
    """Weights that replace those of ``sources`` from a step on, ``[{step: 8000, weights: {web: .2, code: .8}}]``. Every
    source goes on where it stood."""

    epochs: float | None = None
    """How often a run may read each source at most: one that would read one more often does not start. By default a
    source that ends begins anew, in another order."""

    tokenizer: str = "bpe"
    """``bpe`` trains a byte-level BPE of model.vocab_size tokens on the corpus (a small one may give fewer; the model
    then has as many); else the path of a ``tokenizers`` JSON file. Not used by ``backcopy``."""

    data_seed: int = 0
    """Decides the order of the training data (and the text of ``backcopy``), and nothing else."""

    val_fraction: float = 0.02
    """Share of the corpus's documents kept for validation, in (0, 1); the split depends on each document's name or
    content, not on its place. A corpus of one document gives its end. Not used by ``backcopy``."""

    text_field: str = "text"
    """Column that holds the text, for ``hf:`` and tabular corpora."""

    cache_dir: str = "~/.cache/birthmark"
    """Where tokenizers and token shards are kept; they are built once and verified when reused."""

    n_workers: int = 0
    """Processes that load and tokenise ``datasets`` corpora; 0 takes one per core."""

    bos: bool = True
    """Start every ``backcopy`` sequence with BOS (the sink's home; without it none forms)."""

    verify: Literal["checksum", "size"] = "checksum"
    """How shards are verified when reused: SHA-256 of every byte, or file sizes only (for corpora of terabytes)."""

    @property
    def entries(self) -> list[str]:
        """All paths as a list, whichever way they were written."""
        paths = [source.path for source in self.sources] or [self.path]
        return [entry for path in paths for entry in ([path] if isinstance(path, str) else path)]

    def each(self) -> dict[str, DataConfig]:
        """The config of every source alone, by name; of ``path`` alone it is this one, without a name."""
        if not self.sources:
            return {"": self}
        return {
            source.label: replace(self, sources=[], schedule=[], path=source.path, text_field=source.text_field)
            for source in self.sources
        }

    def problems(self) -> list[str]:
        """Everything about this config that can be seen to be wrong without reading a corpus; one line each."""
        found = self._source_problems() if self.sources else self._path_problems()
        found += schedule_problems(self.schedule, [source.label for source in self.sources])
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            found.append(f"data.epochs: {self.epochs} is not a positive number; leave it out for no limit")
        if self.tokenizer != "bpe" and self.path != "backcopy" and not user_path(self.tokenizer).is_file():
            found.append(
                f"data.tokenizer: no file {self.tokenizer!r}; give 'bpe' or the path of a tokenizers JSON file"
            )
        if not 0.0 < self.val_fraction < 1.0:
            found.append(f"data.val_fraction: {self.val_fraction} is not between 0 and 1, both excluded")
        if not self.text_field:
            found.append("data.text_field: empty; name the column that holds the text")
        if not self.cache_dir:
            found.append("data.cache_dir: empty; name a folder that can be written to")
        if not 0 <= self.n_workers <= 4096:
            found.append(f"data.n_workers: {self.n_workers} is not 0 to 4096; 0 takes one per core")
        found += outside("data", self, {"data_seed": SEEDS})
        if self.verify not in ("checksum", "size"):
            found.append(f"data.verify: {self.verify!r} is neither 'checksum' nor 'size'")
        return found

    def _source_problems(self) -> list[str]:
        found = []
        for name, default in (("path", DataConfig.path), ("text_field", DataConfig.text_field)):
            if getattr(self, name) != default:
                found.append(f"data.{name}: {getattr(self, name)!r} is not read beside data.sources; leave it out")
        for name, count in Counter(source.label for source in self.sources).items():
            if count > 1:
                found.append(f"data.sources: {count} are called {name!r}; give each a name")
            if not name.isprintable() or "/" in name or len(name) > 64:
                found.append(f"data.sources: {name!r} is no name; give up to 64 letters without a slash")
        weights = {source.label: source.weight for source in self.sources}
        missing = [name for name, weight in weights.items() if weight is None]
        if missing and len(missing) < len(weights):
            found.append(f"data.sources: {missing[0]!r} has no weight, but others have; give all a weight, or none")
        for name, weight in weights.items():
            if weight is not None and not 0 <= weight < math.inf:
                found.append(f"data.sources: weight {weight} of {name!r} is not a number of at least 0")
            elif weight == 0 and not any(name in change.given for change in self.schedule):
                found.append(f"data.sources: weight 0 of {name!r}, which is never read; leave the source out")
        if weights and not any(weight is None or weight > 0 for weight in weights.values()):
            found.append("data.sources: no weight is positive at the start; give one that is")
        for name, config in self.each().items():
            if config.path == "backcopy":
                found.append(f"data.sources: {name!r} is backcopy, which no text goes with; give it as data.path")
            else:
                found += [
                    problem.replace("data.path", f"data.sources, {name!r}") for problem in config._path_problems()
                ]
        return found

    def _path_problems(self) -> list[str]:
        if not self.entries:
            return ["data.path: empty; name a corpus, for example 'stdlib'"]
        found = []
        for entry in self.entries:
            named = entry in (*NAMED_CORPORA, "backcopy") or entry.startswith("hf:")
            if named and not isinstance(self.path, str):
                found.append(f"data.path: {entry!r} in a list; it stands alone, only files and folders are listed")
            elif entry.startswith("hf:") and not entry.split(":")[1]:
                found.append(f"data.path: {entry!r} names no dataset; write hf:NAME or hf:NAME:CONFIG")
            elif not named:
                found += self._file_problems(entry)
        suffixes = {Path(entry).suffix.lower() for entry in self.entries}
        if len(suffixes) > 1 and suffixes & set(TABLE_SUFFIXES):
            kinds = ", ".join(suffix or "a folder" for suffix in sorted(suffixes))
            found.append(f"data.path: lists {kinds}; tabular files go with files of the same kind only")
        return found

    @staticmethod
    def _file_problems(entry: str) -> list[str]:
        path = user_path(entry)
        if not entry or not path.exists():
            known = f"a file or folder, {', '.join(map(repr, NAMED_CORPORA))}, 'backcopy' or 'hf:NAME'"
            return [f"data.path: {entry!r} does not exist; give {known}"]
        if path.is_file() and path.suffix.lower() not in TEXT_SUFFIXES + TABLE_SUFFIXES:
            return [f"data.path: {entry!r} is of no known kind; known are {' '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)}"]
        return []
