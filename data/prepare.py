"""From a config to batches: connect to the corpus, prepare tokenizer and shards once, set up the two splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..files import user_path
from . import backcopy
from .batch_ramp import BatchSizes
from .batches import BatchSource, FixedWindows, TokenWindows
from .building.tokenised import naming, tokenise
from .cache import fingerprint
from .config import DataConfig
from .mixing.mixture import InTurn, Mixture
from .packing.borders import DocumentBorders
from .packing.cuts import Layout, common_borders
from .shards import unigram_cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

_BACKCOPY_SAMPLE = 256


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
    """UTF-8 bytes of validation text per validation token (end-of-text tokens count, and BOS of documents); None: there
    is no text."""

    borders: DocumentBorders | None = None
    """How ids say where documents begin; None where nothing does."""

    n_targets: Callable[[np.ndarray], np.ndarray] | None = None
    """Tokens to predict in training samples of these numbers; None where all have as many."""

    groups: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Positions whose loss is reported apart: inputs ``[B, T]`` → bool ``[B, T]``."""

    tokenizer_path: Path | None = None
    """The ``tokenizers`` JSON in use."""

    @property
    def mixture(self) -> Mixture | None:
        """The training samples where they are of ``data.sources``; these take turns in ``val``."""
        return self.train if isinstance(self.train, Mixture) else None

    def epochs(self, n_samples: int) -> dict[str, float]:
        """How often the first ``n_samples`` of the training read each source; nothing where samples are endless."""
        if self.mixture is not None:
            return self.mixture.epochs(n_samples)
        return {} if self.train.n_samples is None else {"": n_samples / self.train.n_samples}


def prepare(
    config: DataConfig, *, vocab_size: int, seq_len: int, batch_sizes: BatchSizes | None = None
) -> PreparedData:
    """Make the data of ``config`` ready for a model of ``vocab_size`` tokens and samples of ``seq_len`` positions.

    Every process of a run may call it at once: the first builds, the others wait and reuse. ``batch_sizes`` are those
    of the run's steps, at which ``data.schedule`` changes weights.

    Raises:
        UsageError: the config cannot be met; one line that names the field.
        RunError: damaged shards or a full disk; one line that names the file.
    """
    if problems := config.problems():
        raise UsageError("\n".join(problems))
    if config.schedule and batch_sizes is None:
        raise ValueError("data.schedule changes weights at steps, whose batch_sizes are missing")
    if config.path == "backcopy":
        return _prepare_backcopy(config, vocab_size, seq_len)
    text = tokenise(config, vocab_size)
    tokenizer, n_tokens = text.tokenizer, text.n_tokens
    tokenizer_hash = None if tokenizer is None else tokenizer.sha256
    layouts: dict[str, Layout] = {}
    train, val, facts = {}, {}, {}
    for name, tokens in text.tokens.items():
        with naming(name):
            layout = layouts[name] = Layout.of(config.each()[name], tokenizer)
            of = {**tokens.facts, "tokenizer": tokenizer_hash}
            cut = partial(layout.cut, seq_len=seq_len, cache_dir=user_path(config.cache_dir), of=of)
            train_cut, val_cut = cut(tokens.train, "train"), cut(tokens.val, "val")
            train[name] = TokenWindows(tokens.train, seq_len, n_tokens, config.data_seed, cut=train_cut)
            val[name] = FixedWindows(tokens.val, seq_len, n_tokens, cut=val_cut)
            facts[name] = layout.facts(tokens.facts, train_cut)
    of_all = {
        "data_seed": config.data_seed,
        "val_fraction": config.val_fraction,
        **({"tokenizer": config.tokenizer, "tokenizer_hash": tokenizer_hash} if tokenizer is not None else {}),
        "vocab_size": n_tokens,
        **text.record,
    }
    common: dict[str, Any] = {
        "vocab_size": n_tokens,
        "vocab_size_asked": vocab_size,
        "token_texts": _ids_as_texts if tokenizer is None else tokenizer.token_texts,
        "tokenizer_path": text.tokenizer_path,
        "borders": common_borders(layouts.values()),
    }
    if not config.sources:
        record = {"path": config.path, **facts[""], **of_all}
        bytes_per_token = facts[""]["bytes_per_token"]
        targets = train[""].n_targets if config.pads else None
        return PreparedData(
            train[""], val[""], record=record, bytes_per_token=bytes_per_token, n_targets=targets, **common
        )
    sizes = {name: windows.n_tokens for name, windows in train.items()}
    mixture = Mixture(
        train,
        {source.label: sizes[source.label] if source.weight is None else source.weight for source in config.sources},
        [(batch_sizes.before(change.step), change.weights) for change in config.schedule] if batch_sizes else (),
    )
    record = {
        "kind": "sources",
        "path": config.entries,
        "content_hash": fingerprint(sources=[facts[name]["content_hash"] for name in facts]),
        "sources": {name: {**facts[name], "share": share} for name, share in mixture.shares.items()},
        "bytes_per_token": _mean_bytes(mixture.shares, facts),
        "unigram_entropy": None,
        **of_all,
    }
    common["n_targets"] = mixture.n_targets if config.pads else None
    return PreparedData(mixture, InTurn(val), record=record, bytes_per_token=record["bytes_per_token"], **common)


def _mean_bytes(shares: Mapping[str, float], facts: Mapping[str, dict[str, Any]]) -> float | None:
    """Bytes per token of a mixture; None if a source does not know its own."""
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
