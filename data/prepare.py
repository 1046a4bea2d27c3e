"""From a config to batches: connect to the corpus, prepare tokenizer and shards once, set up the two splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..files import file_sha256, user_path
from . import backcopy
from .batches import BatchSource, FixedWindows, TokenWindows
from .cache import build_once, fingerprint
from .config import DataConfig
from .corpora import Corpus, open_corpus
from .encode import shortened, text_chunks
from .shards import build_shards, unigram_cross_entropy
from .tokenizer import TRAINING_BYTES, TextTokenizer, evenly, train_bpe

if TYPE_CHECKING:
    from torch import Tensor

_BACKCOPY_SAMPLE = 256
_TOKENIZER_FORMAT = 1


@dataclass(frozen=True)
class PreparedData:
    """Everything that training and measurement ask of the data."""

    train: BatchSource
    """Training samples, in the order that ``data_seed`` decides."""

    val: BatchSource
    """Validation samples, in corpus order."""

    vocab_size: int
    """Tokens that the data can hold; at most model.vocab_size, and fewer where a small corpus gives no more."""

    vocab_size_asked: int
    """What `prepare` was given: model.vocab_size of the config."""

    record: dict[str, Any]
    """What a run's record keeps: JSON-able, with hashes of corpus and tokenizer."""

    token_texts: Callable[[Sequence[int]], list[str]]
    """Token ids to readable text, one string per id."""

    bytes_per_token: float | None = None
    """UTF-8 bytes of validation text per validation token (end-of-text tokens count); None: there is no text."""

    groups: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Positions whose loss is reported apart: inputs ``[B, T]`` → bool ``[B, T]``."""

    tokenizer_path: Path | None = None
    """The ``tokenizers`` JSON in use."""


def prepare(config: DataConfig, *, vocab_size: int, seq_len: int) -> PreparedData:
    """Make the data of ``config`` ready for a model of ``vocab_size`` tokens and samples of ``seq_len`` positions.

    Every process of a run may call it at once: the first builds, the others wait and reuse.

    Raises:
        UsageError: the config cannot be met; one line that names the field.
        RunError: damaged shards or a full disk; one line that names the file.
    """
    if problems := config.problems():
        raise UsageError("\n".join(problems))
    if config.path == "backcopy":
        return _prepare_backcopy(config, vocab_size, seq_len)
    corpus = open_corpus(config)
    cache_dir = user_path(config.cache_dir)
    tokenizer, tokenizer_path = _prepare_tokenizer(config, corpus, vocab_size, cache_dir)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"model.vocab_size: {vocab_size} is smaller than the {tokenizer.vocab_size} tokens of data.tokenizer "
            f"{config.tokenizer!r}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    shards = build_shards(corpus, tokenizer, cache_dir, val_fraction=config.val_fraction, verify=config.verify)
    train = TokenWindows(shards.tokens("train"), seq_len, tokenizer.vocab_size, config.data_seed)
    val = FixedWindows(shards.tokens("val"), seq_len, tokenizer.vocab_size)
    splits = shards.meta["splits"]
    bytes_per_token = splits["val"]["bytes"] / splits["val"]["tokens"]
    record = {
        "kind": corpus.kind,
        "path": config.path,
        "content_hash": shards.meta["content_hash"],
        "data_seed": config.data_seed,
        "val_fraction": config.val_fraction,
        "documents": {split: facts["documents"] for split, facts in splits.items()},
        "tokens": {split: facts["tokens"] for split, facts in splits.items()},
        "bytes": {split: facts["bytes"] for split, facts in splits.items()},
        "skipped": shards.meta["skipped"],
        "tokenizer": config.tokenizer,
        "tokenizer_hash": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": bytes_per_token,
        "unigram_entropy": shards.meta["unigram_entropy"],
    }
    return PreparedData(
        train=train,
        val=val,
        vocab_size=tokenizer.vocab_size,
        vocab_size_asked=vocab_size,
        record=record,
        token_texts=tokenizer.token_texts,
        bytes_per_token=bytes_per_token,
        tokenizer_path=tokenizer_path,
    )


def _prepare_tokenizer(
    config: DataConfig, corpus: Corpus, vocab_size: int, cache_dir: Path
) -> tuple[TextTokenizer, Path]:
    if config.tokenizer != "bpe":
        path = user_path(config.tokenizer)
        return TextTokenizer.load(path), path
    key = fingerprint(
        format=_TOKENIZER_FORMAT,
        content_hash=corpus.content_hash(),
        val_fraction=config.val_fraction,
        vocab_size=vocab_size,
        training_bytes=TRAINING_BYTES,
    )
    folder = cache_dir / f"tokenizer-{key[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        # The validation text stays unseen, by the tokenizer too.
        train_texts = (document.text for document in corpus.documents() if document.split == "train")
        chunks = (chunk for text in train_texts for chunk in text_chunks(shortened(text)))
        path = scratch / "tokenizer.json"
        path.write_bytes(train_bpe(evenly(chunks, corpus.n_bytes), vocab_size).content)
        return {"files": {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}}}

    build_once(folder, build)
    return TextTokenizer.load(folder / "tokenizer.json"), folder / "tokenizer.json"


def _prepare_backcopy(config: DataConfig, vocab_size: int, seq_len: int) -> PreparedData:
    train, val = (
        backcopy.BackCopy(vocab_size, seq_len, config.data_seed, split, config.bos) for split in ("train", "val")
    )
    inputs = val.batch(0, _BACKCOPY_SAMPLE)[:, :-1]
    counts = [
        np.bincount(source.batch(0, _BACKCOPY_SAMPLE)[:, 1:].ravel(), minlength=vocab_size) for source in (train, val)
    ]
    record = {
        "kind": "backcopy",
        "path": "backcopy",
        "data_seed": config.data_seed,
        "bos": config.bos,
        "vocab_size": vocab_size,
        "bytes_per_token": None,
        "trigger_share": float(np.isin(inputs, backcopy.TRIGGERS).mean()),
        "optimal_loss": float(val.next_token_entropy()[inputs].mean()),
        "unigram_entropy": unigram_cross_entropy(*counts),
    }
    return PreparedData(
        train=train,
        val=val,
        vocab_size=vocab_size,
        vocab_size_asked=vocab_size,
        record=record,
        token_texts=backcopy.token_texts,
        groups={"trigger": backcopy.trigger_mask},
    )
