"""Config of the source of tokens."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self, get_args

from ..files import user_path
from ..schema import SEEDS, outside
from ..urls import keep_credentials
from .named_sets import hub_path, name_problem
from .suffixes import TABLE_SUFFIXES, TEXT_SUFFIXES, corpus_suffix, token_suffixes

# ---------------------------------------------------------------- tokens at given places of every sequence

#: Word for a token that is drawn anew for each sample, uniform over the vocabulary.
RANDOM = "random"


def read_places(entries: Sequence[str]) -> dict[int, int | str]:
    """Read ``POSITION=TOKEN`` or ``POSITION=random``, by position from 0.

    Raises:
        ValueError: an entry is neither, or a position occurs twice; the message repeats it.
    """
    found: dict[int, int | str] = {}
    for entry in entries:
        position, _, token = str(entry).partition("=")
        if not position.isdecimal() or not (token.isdecimal() or token == RANDOM):
            raise ValueError(f"{entry!r} is neither POSITION=TOKEN nor POSITION={RANDOM}, as in 0=17")
        if int(position) in found:
            raise ValueError(f"position {position} stands twice")
        found[int(position)] = RANDOM if token == RANDOM else int(token)
    return found


# ---------------------------------------------------------------- shares of sources that change while a run goes on


@dataclass(frozen=True)
class WeightChange:
    """The weights of a mixture from a step on."""

    step: int
    """Optimizer steps before it: the next batch is the first with these weights."""

    weights: dict[str, float]
    """Shares of the training tokens by the sources' names, relative to each other; a source that is left out is not
    read."""

    @property
    def given(self) -> set[str]:
        """Weights of the sources that are read."""
        return {name for name, weight in self.weights.items() if weight}


def schedule_problems(schedule: Sequence[WeightChange], names: Iterable[str]) -> list[str]:
    """List everything that makes changes of the weights of these sources impossible, one line each, with the remedy."""
    names, found, before = list(names), [], 0
    if schedule and not names:
        return ["data.schedule: changes the weights of data.sources, and there are none; leave it out"]
    for i, change in enumerate(schedule):
        place = f"data.schedule[{i}]"
        if not before < change.step <= 10**10:
            found.append(f"{place}.step: {change.step} is not above {before}, where the weights before it begin")
        before = max(before, change.step)
        for name, weight in change.weights.items():
            if name not in names:
                found.append(f"{place}.weights: {name!r} is none of data.sources; they are {', '.join(names)}")
            if not 0 <= weight < math.inf:
                found.append(f"{place}.weights: {weight} of {name!r} is not a number of at least 0")
        if not change.given:
            found.append(f"{place}.weights: none is positive; give a source that is read")
    return found


# ---------------------------------------------------------------- sources, splits, packing and batches

NAMED_CORPORA = ("stdlib", "readmes")
"""Names of ``data.path`` that stand for text found on this machine; `birthmark.data.corpora.CORPORA` opens them."""

TokenDtype = Literal["", "uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
"""Types in which tokens may be stored; "": the file says it."""


def is_remote(named: str) -> bool:
    """Return True if a path is a URL, which `birthmark.data.remote` copies."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", named) is not None


BosName = Literal["document", "sequence", "none"]
PackingName = Literal["concat", "documents", "best_fit"]


def _keep_credentials(config: SourceConfig | DataConfig) -> None:
    """Take the credentials out of the URLs of a config, which is stored, logged and shown; this process keeps them."""
    for name in (one.name for one in fields(config)):
        value = getattr(config, name)
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            bare = keep_credentials(value) if isinstance(value, str) else [keep_credentials(one) for one in value]
            object.__setattr__(config, name, bare)


def _name_set(config: SourceConfig | DataConfig) -> None:
    """Replace the short name of a set by its path on the hub, so that a run's record says which it was."""
    if isinstance(config.path, str) and (path := hub_path(config.path)) != config.path:
        if isinstance(config, SourceConfig):
            object.__setattr__(config, "name", config.name or config.path.partition(":")[0])
        object.__setattr__(config, "path", path)


@dataclass(frozen=True)
class SourceConfig:
    """One of several corpora that a run reads in given shares."""

    path: str | list[str]
    """Corpus, as in ``data.path``, but not ``backcopy``."""

    weight: float | None = None
    """Share of the training tokens, relative to the weights of the others; without any weights, shares follow the
    sources' sizes. 0: read by ``schedule`` alone."""

    name: str = ""
    """Name in curves and messages; by default the last part of its path."""

    text_field: str = "text"
    """Column that holds the text, for ``hf:`` and tabular corpora."""

    token_dtype: TokenDtype = ""
    """See ``data.token_dtype``."""

    end_token: int | None = None
    """See ``data.end_token``."""

    val_path: str | list[str] | None = None
    """See ``data.val_path``."""

    def __post_init__(self) -> None:
        _keep_credentials(self)
        _name_set(self)

    @property
    def label(self) -> str:
        """Name, given or from its path."""
        first = self.path if isinstance(self.path, str) else (self.path or [""])[0]
        return self.name or Path(first.rpartition(":")[2]).stem or first


#: Fields that every source has for itself, beside its path.
_OF_SOURCES = ("text_field", "token_dtype", "end_token", "val_path")
#: Fields of a corpus that is whole on a disk.
_ON_DISK = ("token_dtype", "end_token", "val_path", "stage_to", "decontaminate", "max_bad_rows", "n_workers")
#: Fields that say how a corpus is read, which ``backcopy`` is not.
_OF_CORPORA = (*_OF_SOURCES, "max_bad_rows")
HOW_READ = ("cache_dir", "cache_gb", "stage_to", "timeout_s", "n_workers", "verify")
"""Fields that say how data are read and change no sample."""


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and the order of the training data."""

    path: str | list[str] = "stdlib"
    """Corpus: ``stdlib`` (source text of the running Python's standard library), ``readmes`` (what the packages
    installed beside this one say of themselves, mostly English prose), ``backcopy`` (the bigram-backcopy task), one or
    more .txt/.md/.py files or folders, ``hf:NAME[:CONFIG]`` (anything that ``datasets`` loads), a set of the hub by a
    short name such as ``fineweb-edu:sample-10BT`` (``birthmark data`` lists them), one or more local
    .parquet/.arrow/.json/.jsonl/.csv files of one kind, or tokens that exist (docs/data.md)."""

    sources: list[SourceConfig] = field(default_factory=list)
    """In place of ``path``: corpora that are read in the shares of their weights, ``[{path: …, weight: .7, name: web},
    …]``. All share one tokenizer; each keeps documents of its own for validation."""

    schedule: list[WeightChange] = field(default_factory=list)
    """Weights that replace those of ``sources`` from a step on, ``[{step: 8000, weights: {web: .2, code: .8}}]``. Every
    source goes on where it stood."""

    epochs: float | None = None
    """Largest number of times that a run may read each source: a run that would read one more often does not start. By
    default a source that ends begins again, in another order.
    """

    stream: bool = False
    """Read tables or an ``hf:`` set from their first row to their last while the run goes on, and keep nothing of them:
    for sets that are never whole on the disk. Needs a tokenizer file."""

    n_streams: int = 8
    """For ``stream``: parts in which the set is read in parallel, each with its own files, or rows if there are fewer
    files. The order of samples depends on it and not on the number of processes, which should be no larger.
    """

    shuffle_buffer: int = 256
    """For ``stream``: sequences of each of its parts that are shuffled together; files are shuffled too."""

    val_documents: int = 512
    """For ``stream``: documents that validation reads, the first whose hash is below val_fraction. Training leaves out
    all whose hash is.
    """

    tokenizer: str = "bpe"
    """``bpe`` trains a byte-level BPE of model.vocab_size tokens on the corpus (a small one may give fewer; the model
    then has as many); else the path of a ``tokenizers`` JSON file. Not used by ``backcopy``. For a corpus of tokens it
    is only used to show them; without one, ids stand for their texts.
    """

    data_seed: int = 0
    """Seed of the order of the training data (and of the text of ``backcopy``), and of nothing else."""

    val_fraction: float = 0.02
    """Share of the corpus's documents kept for validation, in (0, 1); the split depends on each document's name or
    content, not on its place. A corpus of one document gives its end. Not used by ``backcopy``."""

    text_field: str = "text"
    """Column that holds the text, for ``hf:`` and tabular corpora; no other is read."""

    max_bad_rows: int = 0
    """Rows of tables that may be damaged: they are left out and counted; one more ends the run with its place. Above 0,
    every row of .jsonl and .csv files is looked at once, before the reading."""

    token_dtype: TokenDtype = ""
    """Type of stored tokens, for token files that do not say it: those of nanoGPT (``uint16``) and OLMo."""

    end_token: int | None = None
    """Token that ends a document, for token files. Files that do not say where documents end are read once to find the
    ends, and each document belongs to one split; without it, validation has the end of each file. ``packing``, ``bos``
    and ``model.attention.documents`` take the tokenizer's end-of-text token by default."""

    val_path: str | list[str] | None = None
    """Token files for validation, such as nanoGPT's ``val.bin``, in place of a part of ``path``."""

    decontaminate: str | list[str] | None = None
    """Evaluation texts, files or folders that ``path`` could name: documents that share ``decontaminate_ngram`` words
    in a row with one are left out of the training (docs/data.md)."""

    decontaminate_ngram: int = 13
    """Words in a row, without case and punctuation, that say that a document repeats an evaluation text; 13 as for
    GPT-3."""

    cache_dir: str = "~/.cache/birthmark"
    """Folder for tokenizers and token shards; they are built once and verified when reused."""

    stage_to: str = ""
    """A folder on a drive of each node's own: token shards are copied there once per node, checked, and read there."""

    cache_gb: float | None = None
    """Token files, and tables that ``stream`` reads, are not copied from URLs: the blocks that the next batches need
    are read, and kept in a cache of so many GB (10⁹ bytes) in ``cache_dir``, which a node's processes share. For
    corpora larger than a node's disk."""

    timeout_s: float = 60.0
    """Seconds without a sign of life after which a remote path is given up; with ``stream``, this concerns a remote
    ``tokenizer`` and tables that are read through ``cache_gb``.
    """

    n_workers: int = 0
    """Processes that tokenise a corpus on a disk, and that hash the rows of tables; 0 takes one per core."""

    bos: BosName | bool = True
    """Place of BOS: before every ``document``, before every ``sequence``, or nowhere, ``none``. BOS is the token that
    the tokenizer puts before texts, or else its end-of-text token. ``true`` is each corpus's default: ``sequence`` for
    ``backcopy`` (the sink's home; without it none forms) and ``none`` for text; ``false`` is ``none``. A sequence of
    ``backcopy`` is one document.
    """

    packing: PackingName = "concat"
    """Packing of documents into sequences: ``concat``, as one text that is cut anywhere; ``documents``, whole ones in
    corpus order, padded at the end; ``best_fit``, whole ones, each where it leaves the least room (best-fit decreasing,
    arXiv 2404.10830). The last two split documents that are longer than a sequence, and losses ignore their padding.
    """

    tokens_at: list[str] = field(default_factory=list)
    """For studies: tokens put at places of every sequence, in training and validation, ``[0=17, 1=random]``. Positions
    count from 0; ``random`` is drawn anew for each sequence, uniform over the vocabulary (arXiv 2410.10781, section
    5)."""

    train_samples: int | None = None
    """For studies of the amount of data: train on the first so many sequences alone, again and again in one order."""

    verify: Literal["checksum", "size"] = "checksum"
    """Check of reused shards: SHA-256 of every byte, or file sizes only (for corpora of terabytes)."""

    def __post_init__(self) -> None:
        _keep_credentials(self)
        _name_set(self)

    @property
    def bos_at(self) -> str:
        """Place of BOS, resolved: ``document``, ``sequence`` or ``none``."""
        if isinstance(self.bos, bool):
            return "sequence" if self.bos and self.path == "backcopy" else "none"
        return self.bos

    @property
    def pads(self) -> bool:
        """True if sequences may hold padding."""
        return self.packing != "concat"

    @property
    def cache_folder(self) -> Path:
        """The folder ``cache_dir``, with the user's home in place of a tilde."""
        return user_path(self.cache_dir)

    @property
    def entries(self) -> list[str]:
        """Paths as a list, in whichever form they were given."""
        paths = [source.path for source in self.sources] or [self.path]
        return [entry for path in paths for entry in ([path] if isinstance(path, str) else path)]

    @property
    def val_entries(self) -> list[str]:
        """Paths of ``val_path`` as a list."""
        return [self.val_path] if isinstance(self.val_path, str) else self.val_path or []

    @property
    def remote_entries(self) -> list[str]:
        """URLs and sets of the hub among all that it reads."""
        texts = [] if self.decontaminate is None else DataConfig(path=self.decontaminate).entries
        validation = [entry for source in self.each().values() for entry in source.val_entries]
        named = (*self.entries, *validation, *texts, self.tokenizer)
        return [entry for entry in named if is_remote(entry) or entry.startswith("hf:")]

    @property
    def is_named(self) -> bool:
        """True if ``path`` is the name of a corpus, not the path of a file."""
        return isinstance(self.path, str) and (self.path in (*NAMED_CORPORA, "backcopy") or self.path.startswith("hf:"))

    def each(self) -> dict[str, DataConfig]:
        """Return the config of each source alone, by name; for a single ``path`` this config, without a name."""
        if not self.sources:
            return {"": self}
        return {
            source.label: replace(
                self, sources=[], schedule=[], path=source.path, **{f: getattr(source, f) for f in _OF_SOURCES}
            )
            for source in self.sources
        }

    def of_another_corpus(self, path: str) -> Self:
        """Return this config for one other corpus: fields that concern only this corpus get their defaults."""
        defaults = {name: getattr(DataConfig, name) for name in _OF_CORPORA}
        return replace(self, path=path, sources=[], schedule=[], cache_gb=None, **defaults)

    @property
    def reads_text(self) -> bool:
        """True if the corpus is text, or tokens of text; ``backcopy`` is neither."""
        return self.path != "backcopy"

    def problems(self) -> list[str]:
        """List all faults of this config that show without reading a corpus; one line each."""
        found = self._source_problems() if self.sources else self._path_problems()
        found += schedule_problems(self.schedule, [source.label for source in self.sources])
        found += self._stream_problems() + self._cache_problems()
        if self.path == "backcopy":
            found += [
                f"data.{name}: {value!r} is not read by backcopy, whose samples are computed; leave it out"
                for name in _OF_CORPORA
                if (value := getattr(self, name)) != getattr(DataConfig, name)
            ]
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            found.append(f"data.epochs: {self.epochs} is not a positive number; leave it out for no limit")
        if self.tokenizer != "bpe" and self.path != "backcopy" and not self._has_tokenizer_file():
            found.append(
                f"data.tokenizer: no file {self.tokenizer!r}; give 'bpe' or the path of a tokenizers JSON file"
            )
        if not 0.0 < self.val_fraction < 1.0:
            found.append(f"data.val_fraction: {self.val_fraction} is not between 0 and 1, both excluded")
        if not self.text_field:
            found.append("data.text_field: empty; name the column that holds the text")
        if not self.cache_dir:
            found.append("data.cache_dir: empty; name a folder that can be written to")
        found += self._decontamination_problems()
        found += self._alteration_problems()
        if self.max_bad_rows < 0:
            found.append(f"data.max_bad_rows: {self.max_bad_rows} is below 0; 0 allows none")
        if not 0 < self.timeout_s <= 86_400:
            found.append(f"data.timeout_s: {self.timeout_s} is no number of seconds from 0 to 86400; 60 is usual")
        if not 0 <= self.n_workers <= 4096:
            found.append(f"data.n_workers: {self.n_workers} is not 0 to 4096; 0 takes one per core")
        found += outside("data", self, {"data_seed": SEEDS})
        if self.bos not in (*get_args(BosName), True, False):
            found.append(f"data.bos: {self.bos!r} is neither {', '.join(get_args(BosName))} nor true or false")
        if self.packing not in get_args(PackingName):
            found.append(f"data.packing: {self.packing!r} is none of {', '.join(get_args(PackingName))}")
        elif self.packing != "concat" and self.path == "backcopy":
            found.append(
                f"data.packing: {self.packing} is not read by backcopy, whose sequences are one document each; "
                "leave it out"
            )
        if self.verify not in ("checksum", "size"):
            found.append(f"data.verify: {self.verify!r} is neither 'checksum' nor 'size'")
        return found

    def _alteration_problems(self) -> list[str]:
        found = []
        try:
            read_places(self.tokens_at)
        except ValueError as error:
            found.append(f"data.tokens_at: {error}")
        if self.train_samples is not None and self.train_samples < 1:
            found.append(f"data.train_samples: {self.train_samples} is below 1; leave it out for all")
        for name, given in (("tokens_at", self.tokens_at), ("train_samples", self.train_samples is not None)):
            if given and (self.sources or self.stream):
                found.append(f"data.{name}: is not read beside data.sources or data.stream; leave one of them out")
            if given and self.pads:
                found.append(f"data.{name}: is not read with data.packing {self.packing}; leave one of them out")
        return found

    def _decontamination_problems(self) -> list[str]:
        if self.decontaminate is None:
            if self.decontaminate_ngram == DataConfig.decontaminate_ngram:
                return []
            return ["data.decontaminate_ngram: is not read without data.decontaminate; name evaluation texts there"]
        texts = DataConfig(path=self.decontaminate)
        found = [one.replace("data.path", "data.decontaminate") for one in texts._path_problems()]
        if "backcopy" in (self.path, self.decontaminate):
            found.append("data.decontaminate: backcopy has no text to compare; leave it out")
        return found + outside("data", self, {"decontaminate_ngram": (1, 1000)})

    def _has_tokenizer_file(self) -> bool:
        return is_remote(self.tokenizer) or user_path(self.tokenizer).is_file()

    def _stream_problems(self) -> list[str]:
        names = ("n_streams", "shuffle_buffer", "val_documents")
        if not self.stream:
            return [
                f"data.{name}: {value} is read by data.stream alone; leave it out"
                for name in names
                if (value := getattr(self, name)) != getattr(DataConfig, name)
            ]
        found = outside("data", self, dict.fromkeys(names, (1, 1 << 20)))
        if self.tokenizer == "bpe":
            found.append("data.stream: 'bpe' would read the whole set first; give data.tokenizer a tokenizers file")
        given = {f"data.{name}": (name, getattr(self, name)) for name in _ON_DISK}
        for source in self.sources:
            of_source = {name: getattr(source, name) for name in _OF_SOURCES if name in _ON_DISK}
            given |= {f"data.sources, {source.label!r}, {name}": (name, value) for name, value in of_source.items()}
        found += [
            f"{place}: {value!r} is of a corpus on a disk, which data.stream does not read; leave one of them out"
            for place, (name, value) in given.items()
            if value != getattr(DataConfig, name)
        ]
        if self.timeout_s != DataConfig.timeout_s and not is_remote(self.tokenizer) and self.cache_gb is None:
            found.append(
                f"data.timeout_s: {self.timeout_s} is of files that are fetched whole, and data.stream reads with the "
                "timeouts of its libraries; leave it out"
            )
        if self.packing != "concat" or self.bos_at != "none":
            found.append("data.stream: reads documents one behind another: leave data.packing and data.bos out")
        for path in [source.path for source in self.sources] or [self.path]:
            if path in (*NAMED_CORPORA, "backcopy"):
                found.append(f"data.stream: {path!r} is no set that streams; give tables or hf:NAME, or leave it out")
        if len(self.sources) > 1 and any(source.weight is None for source in self.sources):
            found.append("data.stream: does not know the sizes of data.sources; give each a weight")
        if self.epochs is not None and self.epochs != self.epochs // 1:
            found.append(f"data.epochs: {self.epochs} is no whole number, which data.stream counts; give one")
        return found

    def _cache_problems(self) -> list[str]:
        if self.cache_gb is None:
            return []
        found = outside("data", self, {"cache_gb": (0.001, 1e6)})
        if not any(map(is_remote, (*self.entries, *self.val_entries))):
            found.append("data.cache_gb: is read for files behind URLs, and no path is one; leave it out")
        if self.verify == "checksum" and not self.stream:
            found.append(
                "data.cache_gb: data.verify checksum would read the whole corpus first; give data.verify size, which "
                "checks every batch"
            )
        return found

    def _source_problems(self) -> list[str]:
        found = []
        for name in ("path", *_OF_SOURCES):
            if getattr(self, name) != getattr(DataConfig, name):
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
        for entry in self.val_entries:
            found += [problem.replace("data.path", "data.val_path") for problem in self._file_problems(entry)]
        if self.val_path is not None and not self.val_entries:
            found.append("data.val_path: empty; name token files, or leave it out")
        if self.end_token is not None and not 0 <= self.end_token < 1 << 63:
            found.append(f"data.end_token: {self.end_token} is no token; give its id, 0 or more")
        suffixes = {corpus_suffix(entry) for entry in self.entries}
        if len(suffixes) > 1 and suffixes & set(TABLE_SUFFIXES):
            kinds = ", ".join(suffix or "a folder" for suffix in sorted(suffixes))
            found.append(f"data.path: lists {kinds}; tabular files go with files of the same kind only")
        return found

    @staticmethod
    def _file_problems(entry: str) -> list[str]:
        if is_remote(entry):
            return []
        path = user_path(entry)
        if (problem := name_problem(entry)) is not None:
            return [f"data.path: {problem}"]
        if not entry or not path.exists():
            what = f"a file or folder, {', '.join(map(repr, NAMED_CORPORA))}, 'backcopy' or 'hf:NAME'"
            return [f"data.path: {entry!r} does not exist; give {what}"]
        known = TEXT_SUFFIXES + TABLE_SUFFIXES + token_suffixes()
        if path.is_file() and corpus_suffix(path.name) not in known:
            return [f"data.path: {entry!r} is of no known kind; known are {' '.join(known)}"]
        return []
