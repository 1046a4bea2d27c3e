"""Models that a study of robustness changes: one run from every seed, with its birth, its end and its data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...data.batches import BatchSource
from ...data.building.splitting import evaluation_texts
from ...data.building.tokenised import naming
from ...data.cache import fingerprint
from ...data.config import DataConfig
from ...data.corpora import open_corpus
from ...data.ingest.remote import localised
from ...data.prepare import PreparedData, prepare
from ...data.streaming.streamed_batches import StreamSource
from ...data.token_files.source import open_token_source
from ...errors import UsageError
from ...models.decoder import Decoder
from ...trainer.by_name.model_names import ModelSource, open_source
from ...trainer.config import RunConfig
from ...trainer.devices import device
from ..trials import Trial


@dataclass(frozen=True)
class Base:
    """A finished run of the study."""

    trial: Trial

    @property
    def seed(self) -> int:
        """Seed of its birth."""
        return self.trial.seed

    def birth(self) -> Decoder:
        """Load its model at step 0, a new copy."""
        return self._birth.load().to(device())

    def trained(self) -> Decoder:
        """Load its model at the last step, a new copy."""
        return self._end.load().to(device())

    # Found once: reading a run's config takes longer than a small model.
    @cached_property
    def _birth(self) -> ModelSource:
        return open_source(f"{self.trial.run.path}@0")

    @cached_property
    def _end(self) -> ModelSource:
        return open_source(f"{self.trial.run.path}@{self.trial.step}")


@dataclass(frozen=True)
class Text:
    """Training data of changed models: the data of the bases, or other text in their tokens."""

    config: RunConfig
    """Config of a base."""
    tokenizer: Path | None
    """Theirs, if their data is text."""

    def batch(self, path: str | None, step: int) -> Tensor:
        """Return the sequences of one step ``[B, T+1]``, with as many tokens as the bases' steps.

        Args:
            path: path of other text, as in ``data.path``; None: the bases' own data, from the point where they stopped.
            step: step, from 0.
        """
        sizes = self.config.trainer.batch_sizes
        first = sizes.before(self.config.trainer.max_steps) if path is None else 0
        n = self.config.trainer.global_batch_size
        return torch.from_numpy(self._source(path).batch(first + step * n, n)).to(device())

    def content(self, path: str | None) -> str | None:
        """Return the SHA-256, in hex, of the present text or tokens, without tokenising; cached for unchanged files.
        None for data that cannot change: a synthetic task, or a stream, which `batch` refuses.

        Args:
            path: see `batch`.

        Raises:
            UsageError: the text cannot be read; the message names the field and the path.
            RunError: the text is damaged; the message names the file.
        """
        data = self._data(path)
        if data.path == "backcopy" or data.stream:
            return None
        hashes = {}
        for name, source in localised(data).each().items():
            with naming(name):
                hashes[name] = (open_token_source(source) or open_corpus(source)).content_hash()
        if data.decontaminate is not None:
            # It decides which documents are left.
            hashes["data.decontaminate"] = evaluation_texts(data)[1]
        return fingerprint(sources=hashes)

    def _source(self, path: str | None) -> BatchSource:
        data = self._prepared.get(path)
        if data is None:
            data = self._prepared[path] = self._prepare(path)
        if isinstance(data.train, StreamSource):
            raise UsageError("data.stream: a study of robustness reads its text again and again; leave stream out")
        return data.train

    @cached_property
    def _prepared(self) -> dict[str | None, PreparedData]:
        return {}

    def _data(self, path: str | None) -> DataConfig:
        data = self.config.data
        if path is None:
            return data
        tokenizer = data.tokenizer if self.tokenizer is None else str(self.tokenizer)
        return dataclasses.replace(data.of_another_corpus(path), tokenizer=tokenizer)

    def _prepare(self, path: str | None) -> PreparedData:
        data, model, trainer = self._data(path), self.config.model, self.config.trainer
        return prepare(data, vocab_size=model.vocab_size, seq_len=model.max_seq_len, batch_sizes=trainer.batch_sizes)


def text_of(trial: Trial) -> Text:
    """Return the data of a finished run."""
    return Text(trial.config, trial.run.own_tokenizer())
