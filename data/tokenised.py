"""From a config to token shards: the one way in which text becomes ids, for a run and for ``birthmark tokenise``."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import UsageError
from ..files import user_path
from .cache import build_once, facts_of_files, fingerprint
from .config import DataConfig
from .corpora import Corpus, open_corpus
from .encode import stream_chunks
from .fetching import localised
from .shards import Shards, build_shards
from .splitting import divide
from .token_files import BuiltShards, SplitTokens, TokenSource, open_token_source
from .tokenizer import TextTokenizer, train_bpe
from .workers import in_processes

# ---------------------------------------------------------------- training text of a tokenizer
# An even sample of a whole corpus that fits into memory.
#
# The memory that training takes grows with the number and length of different words in the text. Rare words cannot be
# left out: text without spaces, as in Chinese or base64, has no others. So the sample gets smaller, and stays even.

TRAINING_BYTES = 1 << 26
"""Bytes of text for training a tokenizer."""

TRAINING_WORD_BYTES = 3 << 20
"""Bytes of different words in that text, with the space before each: the library takes 145 bytes of memory for each
word (measured on words of 4 to 64 letters, tokenizers 0.23.3).
"""

TRAINING_CHARS = 1 << 14
"""Characters of a text that is sampled as a unit."""

#: Bytes of text from which on training has a process of its own, whose memory ends with it.
_WORTH_A_PROCESS = 1 << 24
#: Words as the pre-tokenizer of `birthmark.data.tokenizer.train_bpe` makes them.
_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
_LENGTH = struct.Struct("<Q")


class _Job(NamedTuple):
    sample: Path
    vocab_size: int


def train_on_sample(
    texts: Iterable[str], total_bytes: int, vocab_size: int, scratch: Path, most: int = TRAINING_WORD_BYTES
) -> TextTokenizer:
    """Train a byte-level BPE on a sample of ``texts``: `evenly`, then every one, second, fourth, … of these.

    The first of these samples is used whose different words have at most ``most`` bytes.

    Args:
        texts: texts of the training documents, none much longer than `TRAINING_CHARS`.
        total_bytes: size of all of them.
        vocab_size: see `train_bpe`.
        scratch: a folder for the temporary sample.
        most: bytes of different words.

    Raises:
        UsageError: ``vocab_size`` is too small.
        OSError: the sample cannot be written.
    """
    sample = scratch / "sample"
    try:
        _write_sample(evenly(texts, total_bytes), sample, most)
        apart = sample.stat().st_size > _WORTH_A_PROCESS
        ((_, content),) = in_processes(_train, [_Job(sample, vocab_size)], 1, apart=apart)
    finally:
        sample.unlink(missing_ok=True)
    return TextTokenizer(content)


def evenly(texts: Iterable[str], total_bytes: int, limit: int = TRAINING_BYTES) -> Iterator[str]:
    """Yield about ``limit`` bytes of texts, evenly over all ``total_bytes`` of them; all of them if they fit."""
    share = min(1.0, limit / max(1, total_bytes))
    seen = taken = 0
    for text in texts:
        size = len(text.encode("utf-8"))
        if share == 1.0 or taken <= seen * share:
            taken += size
            yield text
        seen += size


def _train(job: _Job) -> bytes:
    with job.sample.open("rb") as file:
        return train_bpe(_read(file), job.vocab_size).content


def _write_sample(texts: Iterable[str], path: Path, most: int) -> None:
    """Write all texts to a file, or as few as `train_on_sample` says."""
    sample, stride = _Sample(path), 1
    try:
        for number, text in enumerate(texts):
            if number % stride:
                continue
            sample.add(text)
            while sample.word_bytes > most and number >= stride:
                sample = sample.thinned()
                stride *= 2
    finally:
        sample.file.close()


class _Sample:
    """Texts in a file, with the total bytes of their different words."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file: BinaryIO = path.open("w+b")
        self.word_bytes = 0
        self._words: set[str] = set()

    def add(self, text: str) -> None:
        new = set(_WORD.findall(text)) - self._words
        self._words |= new
        self.word_bytes += len("".join(new).encode("utf-8"))
        content = text.encode("utf-8")
        self.file.write(_LENGTH.pack(len(content)) + content)

    def thinned(self) -> _Sample:
        """Replace all texts by every other one, the first included."""
        self._words.clear()
        other = _Sample(self._path.with_suffix(".thinner"))
        with self.file:
            self.file.seek(0)
            for text in islice(_read(self.file), 0, None, 2):
                other.add(text)
        other._path = other._path.replace(self._path)
        return other


def _read(file: BinaryIO) -> Iterator[str]:
    while length := file.read(_LENGTH.size):
        yield file.read(*_LENGTH.unpack(length)).decode("utf-8")


# ---------------------------------------------------------------- tokenised
# Conversion of a config's text to token shards, for a run and for ``birthmark tokenise``.

_TOKENIZER_FORMAT = 2


#: Source of a run: text, which becomes shards, or existing tokens.
Source = Corpus | BuiltShards | TokenSource


@dataclass(frozen=True)
class Tokenised:
    """Tokens for a run, by the name of the source; a single corpus has no name."""

    tokenizer: TextTokenizer | None
    """None: all tokens existed, and no tokenizer is named."""
    tokenizer_path: Path | None
    n_tokens: int
    """Number of different tokens that the data can hold."""
    tokens: dict[str, SplitTokens]
    shards: dict[str, Shards]
    """Shards of those sources that are text."""
    record: dict[str, Any]
    """Facts about all sources together for a run's record."""


def tokenise(config: DataConfig, vocab_size: int) -> Tokenised:
    """Return the tokens of every source of ``config``; shards of text are built, or found.

    Every process of a run may call it at once: the first builds, the others wait and reuse.

    Args:
        config: without problems, and not ``backcopy``.
        vocab_size: tokens of the model.

    Raises:
        UsageError: the config cannot be satisfied; one line that names the field.
        RunError: damaged shards or a full disk; one line that names the file.
    """
    local = localised(config)
    sources: dict[str, Source] = {}
    for name, source in local.each().items():
        with naming(name):
            sources[name] = open_token_source(source) or open_corpus(source)
    _check_read(local, sources)
    cache_dir = config.cache_folder
    texts = {name: one for name, one in sources.items() if isinstance(one, Corpus)}
    if config.decontaminate is not None and len(texts) < len(sources):
        name = next(name for name in sources if name not in texts)
        raise UsageError(f"data.decontaminate: {name or 'data.path'} is tokens already; only text can be searched")
    divided = divide(config, texts)
    sources |= divided.corpora
    tokenizer, path = _prepare_tokenizer(local, sources, vocab_size, cache_dir)
    n_tokens = _vocabulary(config, tokenizer, sources, vocab_size)
    tokens: dict[str, SplitTokens] = {}
    built: dict[str, Shards] = {}
    for name, opened in sources.items():
        with naming(name):
            if isinstance(opened, BuiltShards | TokenSource):
                tokens[name] = opened.split(tokenizer, n_tokens)
                continue
            assert tokenizer is not None
            shards = built[name] = build_shards(
                opened,
                tokenizer,
                cache_dir,
                val_fraction=config.val_fraction,
                verify=config.verify,
                n_workers=config.n_workers,
                stage_to=user_path(config.stage_to) if config.stage_to else None,
            )
            facts = shards.facts(opened.kind) | {"duplicates": divided.duplicates[name]}
            tokens[name] = SplitTokens(shards.tokens("train"), shards.tokens("val"), facts)
    return Tokenised(tokenizer, path, n_tokens, tokens, built, divided.record)


def _check_read(config: DataConfig, sources: Mapping[str, Source]) -> None:
    """Raise UsageError for a field about tables that no source reads."""
    for name, source in config.each().items():
        kind = sources[name].kind
        # Evaluation texts beside one corpus may be a table.
        may_read = kind in ("table", "hub") or (config.decontaminate is not None and not config.sources)
        if source.text_field != DataConfig.text_field and not may_read:
            raise UsageError(
                f"data.text_field: {source.text_field!r} is read of tables only, and {source.path!r} is "
                f"{'tokens' if kind in ('tokens', 'shards') else 'text'}; leave the field out"
            )
    if config.max_bad_rows and not any(one.kind in ("table", "hub") for one in sources.values()):
        raise UsageError(
            f"data.max_bad_rows: {config.max_bad_rows} is read of tables only, and there are none; leave the field out"
        )


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Add the name of the source to messages about one of several."""
    try:
        yield
    except UsageError as error:
        if not source:
            raise
        raise UsageError(str(error).replace("data.path", f"data.sources, {source!r}")) from error


def _vocabulary(
    config: DataConfig,
    tokenizer: TextTokenizer | None,
    sources: Mapping[str, Source],
    vocab_size: int,
) -> int:
    """Return the number of tokens that the data can hold: the tokenizer's, else the shards', else the model's.

    Raises:
        UsageError: more than the model has.
    """
    shards = {name: one for name, one in sources.items() if isinstance(one, BuiltShards)}
    if tokenizer is None and len({one.tokenizer_hash for one in shards.values()}) > 1:
        raise UsageError(f"data.sources: {', '.join(map(repr, shards))} are shards of several tokenizers; give one's")
    said = [one.vocab_size for one in shards.values()]
    if tokenizer is None and not said:
        return vocab_size
    what = f"data.tokenizer {config.tokenizer!r}" if tokenizer is not None else f"the shards of {config.entries[0]!r}"
    found = max(said) if tokenizer is None else tokenizer.vocab_size
    if found > vocab_size:
        raise UsageError(
            f"model.vocab_size: {vocab_size} is smaller than the {found} tokens of {what}; set model.vocab_size to "
            f"{found} or more"
        )
    # Tokens of other frameworks may be any that the model has.
    return found if tokenizer is not None or len(said) == len(sources) else vocab_size


def _prepare_tokenizer(
    config: DataConfig,
    sources: Mapping[str, Source],
    vocab_size: int,
    cache_dir: Path,
) -> tuple[TextTokenizer | None, Path | None]:
    if config.tokenizer != "bpe":
        path = user_path(config.tokenizer)
        return TextTokenizer.load(path), path
    tokens = [name for name, source in sources.items() if isinstance(source, BuiltShards | TokenSource)]
    corpora = {name: one for name, one in sources.items() if not isinstance(one, BuiltShards | TokenSource)}
    if not corpora:
        return None, None
    if tokens:
        raise UsageError(
            f"data.tokenizer: 'bpe' would train one, but source {tokens[0]!r} is tokens already; give the path of the "
            "tokenizers JSON file that made them"
        )
    hashes = [corpus.content_hash() for corpus in corpora.values()]
    given = [corpus.splits_key for corpus in corpora.values()]
    key = fingerprint(
        format=_TOKENIZER_FORMAT,
        content_hash=hashes[0] if len(hashes) == 1 else fingerprint(corpora=hashes),
        val_fraction=config.val_fraction,
        vocab_size=vocab_size,
        training_bytes=TRAINING_BYTES,
        training_word_bytes=TRAINING_WORD_BYTES,
        **({"splits": given} if any(given) else {}),
    )
    folder = cache_dir / f"tokenizer-{key[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        # The validation text stays unseen, by the tokenizer too.
        documents = chain.from_iterable(corpus.documents() for corpus in corpora.values())
        train_texts = (document for document in documents if document.split == "train")
        n_bytes = sum(corpus.n_bytes for corpus in corpora.values())
        chunks = (chunk for text in train_texts for chunk in stream_chunks(text.blocks(), TRAINING_CHARS, shorten=True))
        trained = train_on_sample(chunks, n_bytes, vocab_size, scratch)
        (scratch / "tokenizer.json").write_bytes(trained.content)
        return {"files": facts_of_files(scratch)}

    build_once(folder, build)
    return TextTokenizer.load(folder / "tokenizer.json"), folder / "tokenizer.json"
