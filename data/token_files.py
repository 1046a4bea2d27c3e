"""A corpus of tokens, from the paths that a person names to what training and validation read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from ..errors import RunError, UsageError
from ..files import user_path
from .batches import JoinedTokens, Tokens
from .cache import META, Meta, build_once, facts_of_files, file_states, fingerprint, read_built
from .config import DataConfig
from .documents import key_digest
from .shards import Shards, ShardsMeta, unigram_cross_entropy
from .stored_files import file_bytes, sampled_digest
from .token_file_formats import TokenFile, find_token_files, holds_tokens
from .token_file_splits import FileSplit, blocks, largest_token, split_files
from .tokenizer import TextTokenizer

VALIDATION_FILES = "files of data.val_path"
"""Rule of a split whose validation has files of its own, as records name it."""


class SpanTokens(JoinedTokens):
    """Spans of files, one after another; see `birthmark.data.batches.Tokens`.

    Args:
        files: that hold the spans.
        spans: int64 ``[spans, 3]``: number of the file, first token in it, tokens.
        vocab_size: a token that is not below it ends the reading.
    """

    def __init__(self, files: Sequence[TokenFile], spans: np.ndarray, vocab_size: int) -> None:
        self.files = list(files)
        self.spans = spans[spans[:, 2] > 0]
        self.limit = vocab_size
        self._map()

    def _map(self) -> None:
        self._join([file.tokens() for file in self.files], *self.spans.T)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "spans": self.spans, "limit": self.limit}

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read ``length`` tokens from each of ``starts``, across spans if needed; int64 ``[n, length]``.

        Raises:
            RunError: a token that the vocabulary does not have; names the file.
        """
        out = super().read(starts, length)
        if self.may_hold_too_large(out):
            self._refuse(starts, out)
        return out

    @override
    def indexed_starts(self) -> np.ndarray | None:
        if not self._indexed:
            return None
        # A file without an index counts as one document, as in the split.
        begins_P = self._ends_P - self.spans[:, 2]
        found = [begins_P]
        for number, ends_of in self._indexed.items():
            of_file = self.spans[:, 0] == number
            _, firsts_R, lengths_R = self.spans[of_file].T
            ends_D = ends_of()
            run_D = np.searchsorted(firsts_R, ends_D, side="right") - 1
            inside_D = (run_D >= 0) & (ends_D < (firsts_R + lengths_R)[run_D])
            found.append((ends_D - firsts_R[run_D] + begins_P[of_file][run_D])[inside_D])
        return np.unique(np.concatenate(found))

    @override
    def end_indexed(self, token: int | None) -> bool | None:
        if not self._indexed:
            return None
        # A span is a run of documents.
        ends_P = self._ends_P[np.isin(self.spans[:, 0], list(self._indexed))][:_LOOKED_AT]
        return bool((self.read(ends_P - 1, 1) == token).any())

    @property
    def _indexed(self) -> dict[int, Callable[[], np.ndarray]]:
        """The ends of documents by the index of each file that has spans and an index."""
        named = ((int(number), self.files[int(number)].document_ends) for number in np.unique(self.spans[:, 0]))
        return {number: ends_of for number, ends_of in named if ends_of is not None}

    def _refuse(self, starts: np.ndarray, out: np.ndarray) -> None:
        assert self.limit is not None
        row, column = np.unravel_index(int((out.view(np.uint64) >= self.limit).argmax()), out.shape)
        span = int(np.searchsorted(self._ends_P, starts[row] + column, side="right"))
        file = self.files[int(self.spans[span, 0])]
        raise token_too_large(file, int(out[row, column]), self.limit)


def token_too_large(file: TokenFile, token: int, vocab_size: int) -> RunError:
    """Make the error for a file with a token outside the vocabulary."""
    bits = 8 * np.dtype(file.dtype).itemsize
    if "i" in file.dtype and token >= 1 << (bits - 1):
        token -= 1 << bits  # of a negative one only its bits are known
    return RunError(
        f"{file.path}: holds token {token}, the vocabulary has {vocab_size}; give the tokenizer that made it, its "
        "data.token_dtype, or a larger model.vocab_size"
    )


# ---------------------------------------------------------------- source
# Corpora of tokens, from the paths that a user names to the splits of training and validation.

#: Tokens that the frequencies of a split are estimated from, in windows of so many.
_SAMPLED, _WINDOW = 1 << 20, 1 << 15
#: Runs of documents whose last token is looked at: in a store each may cost a request.
_LOOKED_AT = 1 << 6


class SplitTokens(NamedTuple):
    """The two splits of a corpus of tokens, with the facts for a run's record."""

    train: Tokens
    val: Tokens
    facts: dict[str, Any]


class _Spans(NamedTuple):
    train: np.ndarray
    val: np.ndarray
    documents: dict[str, int] | None
    rule: str


class _SplitMeta(Meta):
    documents: list[int]
    largest: list[int] | None


class _LargestMeta(Meta):
    largest: list[int]


class BuiltShards:
    """A folder of shards that this program wrote, with their tokenizer and splits.

    Raises:
        UsageError: fields are given that it decides itself.
        RunError: a shard is damaged.
    """

    kind = "shards"

    def __init__(self, config: DataConfig, folder: Path) -> None:
        for name in ("token_dtype", "end_token", "val_path"):
            if getattr(config, name) not in ("", None):
                raise UsageError(f"data.{name}: not read of {folder}, whose {META} says it; leave the field out")
        mend = "copy the folder again, or make it again from its text"
        self._shards = Shards(folder, read_built(folder, config.verify, ShardsMeta, mend, file_bytes))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer that made them."""
        return int(self._shards.meta["vocab_size"])

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256, in hex, of the tokenizer that made them."""
        return str(self._shards.meta["tokenizer_hash"])

    def content_hash(self) -> str:
        """Return the SHA-256, in hex, of the text that they were made from."""
        return str(self._shards.meta["content_hash"])

    def split(self, tokenizer: TextTokenizer | None, vocab_size: int) -> SplitTokens:
        """Return their splits.

        Raises:
            UsageError: another tokenizer made them.
        """
        stored = self.tokenizer_hash
        if tokenizer is not None and tokenizer.sha256 != stored:
            raise UsageError(
                f"data.tokenizer: {tokenizer.name} is not the tokenizer of {self._shards.folder} (SHA-256 "
                f"{tokenizer.sha256[:12]}…, that of the shards {stored[:12]}…); give the tokenizer that made them"
            )
        facts = self._shards.facts(self.kind) | {"tokenizer_hash": stored}
        return SplitTokens(self._shards.tokens("train"), self._shards.tokens("val"), facts)


class TokenSource:
    """Token files of other frameworks, read in place, each once even if named several times.

    Files of ``data.val_path`` are for validation alone, although a folder of ``data.path`` may hold them too.

    Raises:
        UsageError: no such files, files of several kinds, a damaged one, none to train on, or a field that is missing
            or not read.
    """

    kind = "tokens"

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        named = [find_token_files(user_path(entry), config.token_dtype) for entry in config.entries]
        val = [find_token_files(user_path(entry), config.token_dtype, "data.val_path") for entry in config.val_entries]
        kinds = sorted({kind for kind, _ in [*named, *val]})
        if len(kinds) > 1:
            raise UsageError(
                f"data.path: token files of {' and '.join(kinds)}; give those of one kind, or data.sources"
            )
        self.format = kinds[0]
        by_path, val_by_path = _each_once(named), _each_once(val)
        files = list(by_path.values())
        if config.val_path is not None:
            train = [file for path, file in by_path.items() if path not in val_by_path]
            if not train:
                raise UsageError(
                    f"data.path: {config.path!r} holds no files but those of data.val_path; name files to train on"
                )
            files = [file.of("train") for file in train] + [file.of("val") for file in val_by_path.values()]
        self._files = files

    @cached_property
    def _content_hash(self) -> str:
        total = hashlib.sha256()
        for file in self._files:
            total.update(key_digest(f"{file.key}\0{file.split}\0{file.dtype}\0{file.offset}\0{file.n_tokens}"))
            for path in file.paths:
                total.update(bytes.fromhex(sampled_digest(path)))
        return total.hexdigest()

    def content_hash(self) -> str:
        """Return the SHA-256, in hex, over name, layout and 16 parts of every file: no file is read whole
        for it.
        """
        return self._content_hash

    def split(self, tokenizer: TextTokenizer | None, vocab_size: int) -> SplitTokens:
        """Return the splits, of tokens below ``vocab_size``.

        Raises:
            UsageError: one of the splits is empty.
            RunError: a token that the vocabulary does not have.
        """
        spans, largest = self._spans()
        if self._config.verify == "checksum":
            for file, token in zip(self._files, largest or self._largest(), strict=True):
                if token >= vocab_size:
                    raise token_too_large(file, token, vocab_size)
        train, val = (SpanTokens(self._files, part, vocab_size) for part in (spans.train, spans.val))
        counted = {"documents": spans.documents} if spans.documents is not None else {}
        facts = {
            "kind": self.kind,
            "format": self.format,
            "split": spans.rule,
            "content_hash": self.content_hash(),
            **counted,
            "tokens": {"train": len(train), "val": len(val)},
            "bytes_per_token": None,
            "unigram_entropy": unigram_cross_entropy(*(_counts(part, vocab_size) for part in (train, val))),
        }
        return SplitTokens(train, val, facts)

    def _spans(self) -> tuple[_Spans, list[int] | None]:
        """Return the parts of both splits, and the largest token of each file if all were read for it."""
        config = self._config
        if all(f.split is not None or (f.document_ends is None and config.end_token is None) for f in self._files):
            rule = "end of each file" if config.val_path is None else VALIDATION_FILES
            return _joined(split_files(self._files, config.val_fraction, None), rule), None
        states = file_states([path for file in self._files for path in file.paths])
        key = fingerprint(files=states, val_fraction=config.val_fraction, end_token=config.end_token, format=1)
        folder = config.cache_folder / f"split-{key[:16]}"

        def build(scratch: Path) -> dict[str, Any]:
            found = split_files(self._files, config.val_fraction, config.end_token)
            spans = _joined(found, "documents")
            for name, part in (("train", spans.train), ("val", spans.val)):
                np.save(scratch / f"{name}.npy", part)
            assert spans.documents is not None
            largest = [one.largest for one in found]
            known = None if any(token is None for token in largest) else largest
            return {"files": facts_of_files(scratch), "documents": list(spans.documents.values()), "largest": known}

        meta = build_once(folder, build, schema=_SplitMeta)
        train, val = (np.load(folder / f"{name}.npy") for name in ("train", "val"))
        documents = dict(zip(("train", "val"), meta["documents"], strict=True))
        return _Spans(train, val, documents, "documents"), meta["largest"]

    def _largest(self) -> list[int]:
        """Return the largest token of each file, which is read whole once while it is unchanged."""
        known = [(file.dtype, file.offset) for file in self._files]
        key = fingerprint(files=file_states([file.path for file in self._files]), layout=known, format=1)
        folder = self._config.cache_folder / f"largest-{key[:16]}"

        def build(_: Path) -> dict[str, Any]:
            return {"files": {}, "largest": [max(map(largest_token, blocks(f)), default=-1) for f in self._files]}

        return list(build_once(folder, build, schema=_LargestMeta)["largest"])


def open_token_source(config: DataConfig) -> BuiltShards | TokenSource | None:
    """Open the corpus of tokens that ``data.path`` names; None if it names text.

    A folder counts as tokens if it has the index of this project's shards or of litdata, or token files and no other
    corpus.

    Raises:
        UsageError: see the classes; or a field of token files beside text.
        RunError: shards are damaged.
    """
    paths = [] if config.is_named else [user_path(entry) for entry in config.entries]
    built = [path for path in paths if (path / META).is_file() and any(path.glob("train-*.bin"))]
    if len(built) == len(paths) == 1:
        return BuiltShards(config, built[0])
    if built:
        raise UsageError(
            f"data.path: {built[0]} holds shards with splits of their own; give it alone, or in data.sources"
        )
    if paths and all(holds_tokens(path) for path in paths):
        return TokenSource(config)
    for name in ("token_dtype", "end_token", "val_path"):
        # If token paths are named beside text, the field itself is not wrong.
        if getattr(config, name) not in ("", None) and not any(holds_tokens(path) for path in paths):
            raise UsageError(f"data.{name}: read of token files only, and {config.path!r} is text; leave the field out")
    return None


def _each_once(found: Sequence[tuple[str, Sequence[TokenFile]]]) -> dict[Path, TokenFile]:
    """Merge all named files, in that order, by resolved path: a folder and a file in it may both be named."""
    by_path: dict[Path, TokenFile] = {}
    for _, files in found:
        for file in files:
            by_path.setdefault(file.path.resolve(), file)
    return by_path


def _joined(found: Sequence[FileSplit], rule: str) -> _Spans:
    """Join the parts of all files.

    Raises:
        UsageError: one of the splits is empty.
    """

    def of(name: str) -> np.ndarray:
        parts = [
            np.concatenate([np.full((len(runs), 1), number), runs], axis=1)
            for number, runs in enumerate(getattr(one, name) for one in found)
        ]
        return np.concatenate([np.empty((0, 3), dtype=np.int64), *parts])

    train, val = of("train"), of("val")
    for name, part in (("training", train), ("validation", val)):
        if not part[:, 2].sum():
            raise UsageError(
                f"data.val_fraction: no {rule.removesuffix(' of each file')} of data.path falls to {name}; give a "
                "fraction nearer to a half, more tokens, or data.val_path"
            )
    counts = [one.documents for one in found if one.documents is not None]
    documents = {"train": sum(c[0] for c in counts), "val": sum(c[1] for c in counts)} if counts else None
    return _Spans(train, val, documents, rule)


def _counts(tokens: SpanTokens, vocab_size: int) -> np.ndarray:
    """Count each token in windows spread evenly over a split; in all of it if it is small."""
    n_windows = len(tokens) // _WINDOW
    if n_windows < 2:
        return np.bincount(tokens.read(np.array([0]), len(tokens)).ravel(), minlength=vocab_size)
    n = min(n_windows, _SAMPLED // _WINDOW)
    starts = np.arange(n, dtype=np.int64) * n_windows // n * _WINDOW
    return np.bincount(tokens.read(starts, _WINDOW).ravel(), minlength=vocab_size)
