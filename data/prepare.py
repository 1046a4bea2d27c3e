"""From a config to batches: connect to the corpus, prepare tokenizer and shards once, set up the two splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import UsageError
from ..files import user_path
from . import backcopy
from .batch_sizes import BatchSizes
from .batches import BatchSource, FixedWindows, TokenWindows, uniforms
from .cache import fingerprint
from .config import RANDOM, DataConfig, is_remote, read_places
from .fetching import fetched
from .mixture import InTurn, Mixture, SourceOrder
from .packing import DocumentBorders, Layout, common_borders
from .probes import text_probe
from .process_batches import StreamSource
from .shards import unigram_cross_entropy
from .streaming import ShuffledOrder, StreamedTable, StreamSettings, held_out
from .tokenised import Tokenised, naming, tokenise
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from torch import Tensor


# ---------------------------------------------------------------- samples changed on purpose, for studies of the data
# Tokens at given places, and a few samples read again and again.
#
# Both are ablations of *When Attention Sink Emerges in Language Models* (arXiv 2410.10781, section 5).


class AlteredSamples:
    """A source of samples with tokens set at given positions, or of its first samples only. See `BatchSource`.

    Args:
        source: source of the samples.
        places: position → token, or `RANDOM`. Random tokens depend only on ``seed``, ``split``, position and sample.
        split: ``train`` or ``val``.
        seed: seed of random tokens: ``data_seed``.
        first: number of samples to use, repeated in the same order; None: all.

    Raises:
        UsageError: a position or a token that the samples do not have.
    """

    def __init__(
        self, source: BatchSource, places: Mapping[int, int | str], split: str, seed: int, first: int | None = None
    ) -> None:
        for position, token in places.items():
            if position >= source.seq_len:
                raise UsageError(
                    f"data.tokens_at: there is no position {position}: sequences have {source.seq_len} tokens; "
                    f"give one below {source.seq_len}"
                )
            if token != RANDOM and int(token) >= source.vocab_size:
                raise UsageError(
                    f"data.tokens_at: there is no token {token}: the vocabulary has {source.vocab_size}; "
                    f"give one below {source.vocab_size}"
                )
        self.source, self.places, self.split, self.seed = source, dict(places), split, seed
        self.seq_len, self.vocab_size = source.seq_len, source.vocab_size
        self.n_tokens = source.n_tokens
        self.n_samples = source.n_samples if first is None else min(first, source.n_samples or first)
        self._repeats = first is not None

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """See `BatchSource.batch`."""
        if not self._repeats or self.n_samples is None:
            return self._placed(first_sample, n)
        parts, done = [], 0
        while done < n:
            at = (first_sample + done) % self.n_samples
            size = min(n - done, self.n_samples - at)
            parts.append(self._placed(at, size))
            done += size
        return np.concatenate(parts) if parts else self._placed(0, 0)

    def _placed(self, first: int, n: int) -> np.ndarray:
        samples_BT = self.source.batch(first, n).copy()
        for position, token in self.places.items():
            if token == RANDOM:
                drawn = uniforms("token at", self.split, self.seed, position, first=first, shape=(n, 1))[:, 0]
                samples_BT[:, position] = (drawn * self.vocab_size).astype(np.int64)
            else:
                samples_BT[:, position] = token
        return samples_BT


# ---------------------------------------------------------------- preparation of data from a config
# Connect to the corpus, prepare tokenizer and shards once, set up the two splits.

_BACKCOPY_SAMPLE = 256


@dataclass(frozen=True)
class PreparedData:
    """All data for training and measurement."""

    train: BatchSource | StreamSource
    """Training samples, in the order that ``data_seed`` decides."""

    val: BatchSource
    """Validation samples, in corpus order."""

    vocab_size: int
    """Tokens that the data can hold; at most model.vocab_size, and fewer where a small corpus gives no more."""

    vocab_size_asked: int
    """Argument of `prepare`: model.vocab_size of the config."""

    record: dict[str, Any]
    """Facts for a run's record: JSON-able, with hashes of corpus and tokenizer."""

    token_texts: Callable[[Sequence[int]], list[str]]
    """Token ids to readable text, one string per id."""

    bytes_per_token: float | None = None
    """UTF-8 bytes of validation text per validation token (end-of-text tokens count, and BOS of documents); None: there
    is no text."""

    borders: DocumentBorders | None = None
    """Rule by which ids mark the beginnings of documents; None without one."""

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Cutting of the sequences of each of ``data.sources``, or of a single corpus under the name ``""``; empty for
    synthetic data.
    """

    n_targets: Callable[[np.ndarray], np.ndarray] | None = None
    """Tokens to predict in training samples of these numbers; None where all have as many."""

    groups: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Positions whose loss is reported apart: inputs ``[B, T]`` → bool ``[B, T]``."""

    tokenizer_path: Path | None = None
    """The ``tokenizers`` JSON in use."""

    @property
    def mixture(self) -> SourceOrder | None:
        """Order and shares of ``data.sources``, which take turns in ``val``; None for a single corpus."""
        order = self.train.order if isinstance(self.train, Mixture | StreamSource) else None
        return None if order is None or order.names == [""] else order

    def text_probe(self, n_sequences: int, seq_len: int, fewest: int | None = None) -> np.ndarray:
        """Return validation text to measure on, int64 ``[n_sequences, seq_len]``; see
        `birthmark.data.probes.text_probe`.
        """
        n_before = int(any(layout.bos == "sequence" for layout in self.layouts.values()))
        return text_probe(self.val, n_sequences, seq_len, n_before=n_before, fewest=fewest)

    def tokens_by_source(self, n_tokens: int) -> dict[str, int]:
        """Count the tokens of each of ``data.sources`` among the first ``n_tokens``, which are whole samples."""
        taken = self.mixture.taken(n_tokens // self.train.seq_len) if self.mixture is not None else {}
        return {name: count * self.train.seq_len for name, count in taken.items()}

    def epochs(self, n_samples: int) -> dict[str, float]:
        """Return the number of passes over each source in the first ``n_samples`` of the training; empty for endless
        samples.
        """
        if isinstance(self.train, Mixture):
            return self.train.epochs(n_samples)
        return {} if self.train.n_samples is None else {"": n_samples / self.train.n_samples}


def prepare(
    config: DataConfig, *, vocab_size: int, seq_len: int, batch_sizes: BatchSizes | None = None
) -> PreparedData:
    """Make the data of ``config`` ready for a model of ``vocab_size`` tokens and samples of ``seq_len`` positions.

    Every process of a run may call it at once: the first builds, the others wait and reuse. ``batch_sizes`` are those
    of the run's steps, at which ``data.schedule`` changes weights and within which streamed sources are shuffled.

    Raises:
        UsageError: the config cannot be met; one line that names the field.
        RunError: damaged shards or a full disk; one line that names the file.
    """
    if problems := config.problems():
        raise UsageError("\n".join(problems))
    if (config.schedule or (config.stream and config.sources)) and batch_sizes is None:
        raise ValueError("data.schedule and streamed data.sources go by steps, whose batch_sizes are missing")
    if config.path == "backcopy":
        return _altered(config, _prepare_backcopy(config, vocab_size, seq_len))
    if config.stream:
        return _prepare_streams(config, vocab_size, seq_len, batch_sizes)
    text = tokenise(config, vocab_size)
    tokenizer_hash = None if text.tokenizer is None else text.tokenizer.sha256
    layouts: dict[str, Layout] = {}
    train, val, facts = {}, {}, {}
    for name, tokens in text.tokens.items():
        with naming(name):
            source = config.each()[name]
            if source.end_token is not None and source.end_token >= text.n_tokens:
                raise UsageError(
                    f"data.end_token: there is no token {source.end_token}: the vocabulary has {text.n_tokens}"
                )
            layout = layouts[name] = Layout.of(source, text.tokenizer, tokens.train)
            of = {**tokens.facts, "tokenizer": tokenizer_hash}
            cut = partial(layout.cut, seq_len=seq_len, cache_dir=config.cache_folder, of=of)
            train_cut, val_cut = cut(tokens.train, "train"), cut(tokens.val, "val")
            train[name] = TokenWindows(tokens.train, seq_len, text.n_tokens, config.data_seed, cut=train_cut)
            more = {} if source.val_path is None else {"more": "more tokens in data.val_path,"}
            val[name] = FixedWindows(tokens.val, seq_len, text.n_tokens, cut=val_cut, **more)
            facts[name] = layout.facts(tokens.facts, train_cut)
    order = _order(config, {name: windows.n_tokens for name, windows in train.items()}, batch_sizes)
    samples = Mixture(train, order) if config.sources else train[""]
    prepared = _prepared(config, vocab_size, samples, val, facts, order, text, layouts)
    return replace(prepared, n_targets=samples.n_targets) if config.pads else _altered(config, prepared)


def _altered(config: DataConfig, data: PreparedData) -> PreparedData:
    """Alter samples as ``data.tokens_at`` and ``data.train_samples`` say."""
    if not config.tokens_at and config.train_samples is None:
        return data
    places, seed = read_places(config.tokens_at), config.data_seed
    train = AlteredSamples(cast(BatchSource, data.train), places, "train", seed, config.train_samples)
    # Validation is all of it: unless tokens are placed, it stays the source that scores ask for.
    val = AlteredSamples(data.val, places, "val", seed) if places else data.val
    facts = {"tokens_at": config.tokens_at, "train_samples": config.train_samples}
    return replace(data, train=train, val=val, record={**data.record, **facts})


def _order(config: DataConfig, sizes: Mapping[str, int], batch_sizes: BatchSizes | None) -> SourceOrder:
    """Return the shares of ``data.sources`` over the run; a single corpus has all of it."""
    weights = {source.label: source.weight for source in config.sources}
    return SourceOrder(
        list(sizes),
        {name: size if (weight := weights.get(name)) is None else weight for name, size in sizes.items()},
        [(batch_sizes.before(change.step), change.weights) for change in config.schedule] if batch_sizes else (),
    )


def _prepare_streams(config: DataConfig, vocab_size: int, seq_len: int, batch_sizes: BatchSizes | None) -> PreparedData:
    path = fetched(config.tokenizer, config) if is_remote(config.tokenizer) else user_path(config.tokenizer)
    tokenizer = TextTokenizer.load(path)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"model.vocab_size: {vocab_size} is smaller than the {tokenizer.vocab_size} tokens of data.tokenizer "
            f"{config.tokenizer!r}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    layouts: dict[str, Layout] = {}
    tables, val, facts = {}, {}, {}
    for name, source in config.each().items():
        with naming(name):
            layouts[name] = Layout.of(source, tokenizer)
            tables[name] = table = StreamedTable(source)
            tokens, held = held_out(
                table, tokenizer, config.val_documents, config.val_fraction, config.cache_folder, config.verify
            )
            # Fewer than were asked for are all that the fraction holds out.
            is_all = held["n_documents"] < config.val_documents
            more = "a larger set or data.val_fraction," if is_all else "more data.val_documents,"
            val[name] = FixedWindows(tokens, seq_len, tokenizer.vocab_size, more=more)
            facts[name] = {
                "kind": "stream",
                "content_hash": table.identity(),
                "files": table.n_files,
                "documents": {"val": held["n_documents"]},
                "tokens": {"val": held["n_tokens"]},
                "bytes": {"val": held["n_bytes"]},
                "bytes_per_token": held["n_bytes"] / held["n_tokens"],
                "unigram_entropy": None,
            }
    # Without weights there is one source: nobody knows sizes.
    order = _order(config, dict.fromkeys(tables, 1), batch_sizes)
    if batch_sizes is not None:
        order = ShuffledOrder(order, batch_sizes, config.data_seed)
    settings = StreamSettings(
        config.n_streams, config.shuffle_buffer, seq_len, config.data_seed, config.val_fraction, config.epochs
    )
    train = StreamSource(tables, tokenizer, order, settings)
    text = Tokenised(tokenizer, path, tokenizer.vocab_size, tokens={}, shards={}, record={})
    return _prepared(config, vocab_size, train, val, facts, order, text, layouts)


def _prepared(
    config: DataConfig,
    vocab_size: int,
    train: BatchSource | StreamSource,
    val: Mapping[str, FixedWindows],
    facts: Mapping[str, dict[str, Any]],
    order: SourceOrder,
    text: Tokenised,
    layouts: Mapping[str, Layout],
) -> PreparedData:
    """Assemble the prepared data of a text, with the facts for its record."""
    tokenizer = text.tokenizer
    of_all = {
        "data_seed": config.data_seed,
        "val_fraction": config.val_fraction,
        **({"tokenizer": config.tokenizer, "tokenizer_hash": tokenizer.sha256} if tokenizer is not None else {}),
        "vocab_size": text.n_tokens,
        **text.record,
    }
    common: dict[str, Any] = {
        "vocab_size": text.n_tokens,
        "vocab_size_asked": vocab_size,
        "token_texts": _ids_as_texts if tokenizer is None else tokenizer.token_texts,
        "tokenizer_path": text.tokenizer_path,
        "borders": common_borders(layouts.values()),
        "layouts": layouts,
    }
    if not config.sources:
        record = {"path": config.path, **facts[""], **of_all}
        bytes_per_token = facts[""]["bytes_per_token"]
        return PreparedData(train, val[""], record=record, bytes_per_token=bytes_per_token, **common)
    record = {
        "kind": "sources",
        "path": config.entries,
        "content_hash": fingerprint(sources=[facts[name]["content_hash"] for name in facts]),
        "sources": {name: {**facts[name], "share": share} for name, share in order.shares.items()},
        "bytes_per_token": _mean_bytes(order.shares, facts),
        "unigram_entropy": None,
        **of_all,
    }
    return PreparedData(train, InTurn(val), record=record, bytes_per_token=record["bytes_per_token"], **common)


def _mean_bytes(shares: Mapping[str, float], facts: Mapping[str, dict[str, Any]]) -> float | None:
    """Return the bytes per token of a mixture; None if a source does not know its own."""
    of_each = [facts[name]["bytes_per_token"] for name in shares]
    if None in of_each:
        return None
    return sum(share * n for share, n in zip(shares.values(), of_each, strict=True))


def _ids_as_texts(ids: Sequence[int]) -> list[str]:
    return [f"[{int(i)}]" for i in ids]


def _prepare_backcopy(config: DataConfig, vocab_size: int, seq_len: int) -> PreparedData:
    train, val = (
        backcopy.BackCopy(vocab_size, seq_len, config.data_seed, split, config.bos_at != "none")
        for split in ("train", "val")
    )
    inputs = val.batch(0, _BACKCOPY_SAMPLE)[:, :-1]
    counts = [
        np.bincount(source.batch(0, _BACKCOPY_SAMPLE)[:, 1:].ravel(), minlength=vocab_size) for source in (train, val)
    ]
    record = {
        "kind": "backcopy",
        "path": "backcopy",
        "data_seed": config.data_seed,
        "bos": config.bos_at != "none",
        "vocab_size": vocab_size,
        "bytes_per_token": None,
        "trigger_share": float(np.isin(inputs, backcopy.TRIGGERS).mean()),
        # The expected one, which depends less on the samples than the least loss on them.
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
