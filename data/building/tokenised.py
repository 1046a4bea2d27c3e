"""Conversion of a config's text to token shards, for a run and for ``birthmark tokenise``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files import user_path
from ..cache import build_once, facts_of_files, fingerprint
from ..config import DataConfig
from ..corpora import Corpus, files_by_suffix, open_corpus
from ..encode import stream_chunks
from ..ingest.remote import localised
from ..shards import Shards, build_shards
from ..token_files.source import OwnShards, SplitTokens, TokenSource, open_token_source
from ..tokenizer import TextTokenizer
from .splitting import divide
from .training_text import TRAINING_BYTES, TRAINING_CHARS, TRAINING_WORD_BYTES, train_on_sample

_TOKENIZER_FORMAT = 2


#: Source of a run: text, which becomes shards, or existing tokens.
Source = Corpus | OwnShards | TokenSource


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
    cache_dir = user_path(config.cache_dir)
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
            if isinstance(opened, OwnShards | TokenSource):
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
    if config.max_bad_rows and not any(
        sources[name].kind == "table" and {".jsonl", ".csv"} & files_by_suffix(source.entries).keys()
        for name, source in config.each().items()
    ):
        raise UsageError(
            f"data.max_bad_rows: {config.max_bad_rows} is read of .jsonl and .csv files only, and there are none; "
            "leave the field out"
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
    shards = {name: one for name, one in sources.items() if isinstance(one, OwnShards)}
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
    tokens = [name for name, source in sources.items() if isinstance(source, OwnShards | TokenSource)]
    corpora = {name: one for name, one in sources.items() if not isinstance(one, OwnShards | TokenSource)}
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
