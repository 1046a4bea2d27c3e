"""Treatments of trained models in a study of robustness: changes of weights, and changes that train."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.batches import BatchSource
from ...data.cache import fingerprint
from ...data.config import DataConfig
from ...data.corpora import open_corpus
from ...data.decontamination import evaluation_texts
from ...data.fetching import localised
from ...data.prepare import PreparedData, prepare
from ...data.process_batches import StreamSource
from ...data.token_files import open_token_source
from ...data.tokenised import naming
from ...errors import RunError, UsageError
from ...models.adapter_config import AdapterConfig
from ...models.adapters import attach, initialize_adapter, merged
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...study.trials import Trial
from ...trainer.by_name.model_names import ModelSource, open_source
from ...trainer.config import RunConfig
from ...trainer.devices import device
from ...trainer.module import next_token_loss
from ..changes.change import Change, ModelWeights, decoder_of, weights_of
from ..changes.sizes import first_tokens
from ..changes.table import CHANGES, read_kind


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


# ---------------------------------------------------------------- short training
# Short trainings in memory, of all parameters that are not frozen, towards any objective.

#: Share of the steps over which the learning rate rises.
_WARMUP = 0.1
_CLIP = 1.0

#: Function from a model and a batch ``[B, T+1]`` to the objective.
Objective = Callable[[Decoder, Tensor], Tensor]


def train(
    model: Decoder, batch: Callable[[int], Tensor], steps: int, lr: float, objective: Objective | None = None
) -> Decoder:
    """Train a model in place: AdamW (β .9 and .95, no decay), clipped gradients, a constant rate after a warm-up.

    Args:
        model: its parameters with gradients are trained.
        batch: function from a step, from 0, to its token ids ``[B, T+1]``.
        steps: number of steps.
        lr: learning rate.
        objective: loss to minimise; by default that of every next token.

    Raises:
        RunError: the objective is not finite.
    """
    objective = objective or (lambda model, batch_BT: next_token_loss(model, batch_BT).objective)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / (_WARMUP * steps))
        optimizer.zero_grad()
        loss = objective(model, batch(step))
        if not bool(torch.isfinite(loss)):
            raise RunError(f"the training has a loss of {loss.item()} at step {step}: give a smaller lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
    return model.eval()


def towards(teacher: Decoder) -> Objective:
    """Return the objective of the mean KL divergence, in nats, of a model's next-token distributions from the teacher's
    (arXiv 1503.02531).
    """
    teacher.eval().requires_grad_(False)

    def objective(model: Decoder, batch_BT: Tensor) -> Tensor:
        tokens_BT = batch_BT[:, :-1].clamp_min(0)
        wanted_BTV, found_BTV = (one(tokens_BT).float().log_softmax(-1) for one in (teacher, model))
        counts_BT = batch_BT[:, 1:] >= 0
        kl_BT = F.kl_div(found_BTV, wanted_BTV, reduction="none", log_target=True).sum(-1)
        return (kl_BT * counts_BT).sum() / counts_BT.sum()

    return objective


# ---------------------------------------------------------------- treatments
# Treatments of a trained model in a study of robustness: changes of weights, and changes that train.

SecondRole = Literal["", "merged", "teacher"]
"""Role of the other model for a changed one: none, merged into it, or imitated in training."""


@dataclass
class Workplace:
    """Resources of a treatment for one model."""

    base: Base
    """Base that is changed."""
    other: Base
    """Another base, for treatments that take two."""
    text: Text
    needed: Counter[object] = field(default_factory=Counter)
    """Trainings that rows of the study begin with (`Treatment.training`), with the number of rows that still
    need them.
    """
    kept: dict[object, Decoder] = field(default_factory=dict)
    """Models trained for one row that serve another too, until it has used them."""

    def trained(self, training: object, train: Callable[[], Decoder]) -> Decoder:
        """Return the outcome of a training, made unless an earlier row has; freed after the last row that needs it."""
        model = self.kept.pop(training) if training in self.kept else train()
        self.needed[training] -= 1
        if self.needed[training] > 0:
            self.kept[training] = model
        return model


@dataclass(frozen=True)
class Treatment:
    """Base of all treatments. Its fields are its settings in a study file."""

    second: ClassVar[SecondRole] = ""

    def __post_init__(self) -> None:
        if found := self.problems():
            raise UsageError("; ".join(found))

    def problems(self) -> list[str]:
        """List impossible settings, one line each, with the remedy."""
        return []

    @property
    def role(self) -> SecondRole:
        """Role of the other model for the changed one."""
        return self.second

    @property
    def of_other(self) -> bool:
        """True if the changed model shares the other one's birth."""
        return False

    @property
    def texts(self) -> list[str | None]:
        """Texts that it is trained on, for `Text`: a path of other text; None: the data of the bases."""
        return []

    @property
    def paths(self) -> list[str]:
        """Other text that it is trained on."""
        return [path for path in self.texts if path is not None]

    @property
    def training(self) -> object:
        """Key of a training whose outcome other treatments begin with too; None without one."""
        return None

    def check(self, config: ModelConfig) -> None:
        """Raise UsageError if models of this config cannot be treated so."""

    def make(self, place: Workplace) -> Decoder:
        """Make the changed model, on the device of the base, with the base's tokens."""
        raise NotImplementedError


@dataclass(frozen=True)
class WeightChange(Treatment):
    """A change of weights (`birthmark.research.changes`)."""

    change: Change

    @property
    def role(self) -> SecondRole:
        """See :class:`Treatment`."""
        return "merged" if self.change.needs_other else ""

    def check(self, config: ModelConfig) -> None:
        """See :class:`Treatment`."""
        self.change.check(config)

    def make(self, place: Workplace) -> Decoder:
        """See :class:`Treatment`."""
        model = weights_of(place.base.trained())
        other = weights_of(place.other.trained()) if self.change.needs_other else None
        changed = self.change(model, place.base.seed, other)
        # Only tokens that both have can be shown to both.
        return decoder_of(first_tokens(changed, model.config.vocab_size))


@dataclass(frozen=True)
class Tuning(Treatment):
    """Further training of all weights."""

    steps: int
    """Optimizer steps, of as many tokens as those of the base."""
    lr: float
    """Learning rate, constant after a warm-up."""
    data: str | None = None
    """Other text, as data.path takes it; by default the base's own, from where it stopped."""

    def problems(self) -> list[str]:
        """See :class:`Treatment`."""
        return _training_problems(self.steps, self.lr)

    @property
    def texts(self) -> list[str | None]:
        """See :class:`Treatment`."""
        return [self.data]

    def make(self, place: Workplace) -> Decoder:
        """See :class:`Treatment`."""
        return train(place.base.trained(), lambda step: place.text.batch(self.data, step), self.steps, self.lr)


@dataclass(frozen=True)
class Adapting(Treatment):
    """Training of an adapter beside frozen weights (docs: fields of ``adapter``)."""

    adapter: Literal["lora", "prefix", "prefix_plus"]
    """Kind of the adapter."""
    steps: int
    """See `Tuning`."""
    lr: float
    """See `Tuning`."""
    data: str | None = None
    """See `Tuning`."""
    rank: int | None = None
    """Rank of a ``lora``."""
    length: int | None = None
    """Length of a ``prefix``."""
    merged: bool = False
    """Add the product that ``lora`` learned to the weights, and remove the adapter."""

    @property
    def config(self) -> AdapterConfig:
        """The adapter."""
        maps: Any = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"] if self.adapter == "lora" else None
        return AdapterConfig(kind=self.adapter, rank=self.rank, length=self.length, maps=maps)

    def problems(self) -> list[str]:
        """See :class:`Treatment`."""
        found = _training_problems(self.steps, self.lr) + self.config.problems()
        if self.merged and self.adapter != "lora":
            found.append(f"merged is true: {self.adapter} cannot be added to weights, only lora; leave it out")
        return found

    @property
    def texts(self) -> list[str | None]:
        """See :class:`Treatment`."""
        return [self.data]

    @property
    def training(self) -> object:
        """See :class:`Treatment`: a LoRA is trained in the same way if it is merged or not."""
        return replace(self, merged=False)

    def check(self, config: ModelConfig) -> None:
        """See :class:`Treatment`."""
        if found := self.config.misfits(config):
            raise UsageError("; ".join(found))

    def make(self, place: Workplace) -> Decoder:
        """See :class:`Treatment`."""

        def adapted() -> Decoder:
            model = place.base.trained()
            attach(model, self.config)
            initialize_adapter(model, model.config.init, place.base.seed)
            return train(model, lambda step: place.text.batch(self.data, step), self.steps, self.lr)

        model = place.trained(self.training, adapted)
        return decoder_of(ModelWeights(model.config, merged(model))) if self.merged else model


@dataclass(frozen=True)
class Distillation(Treatment):
    """Training of another seed's birth to predict the same as the model (arXiv 1503.02531): the result predicts what
    the model predicts, but has another birth.
    """

    steps: int
    """See `Tuning`."""
    lr: float
    """See `Tuning`."""

    second: ClassVar[SecondRole] = "teacher"

    def problems(self) -> list[str]:
        """See :class:`Treatment`."""
        return _training_problems(self.steps, self.lr)

    @property
    def texts(self) -> list[str | None]:
        """See :class:`Treatment`."""
        return [None]

    @property
    def of_other(self) -> bool:
        """See :class:`Treatment`."""
        return True

    def make(self, place: Workplace) -> Decoder:
        """See :class:`Treatment`."""
        objective = towards(place.base.trained())
        return train(place.other.birth(), lambda step: place.text.batch(None, step), self.steps, self.lr, objective)


def _training_problems(steps: int, lr: float) -> list[str]:
    found = [] if 1 <= steps <= 1 << 40 else [f"steps is {steps}: give at least 1"]
    return found + ([] if 0 < lr < float("inf") else [f"lr is {lr}: give a number above 0"])


#: Changes that train, by the ``kind`` that a study file names.
TRAININGS: dict[str, type[Treatment]] = {"tune": Tuning, "adapt": Adapting, "distill": Distillation}


def read_treatment(fields: Mapping[str, Any]) -> Treatment:
    """Build the treatment that a file gives as ``kind`` and its settings.

    Raises:
        UsageError: no such kind, or unknown settings.
    """
    known: dict[str, type[Change] | type[Treatment]] = {**CHANGES, **TRAININGS}
    found = read_kind(fields, known)
    return WeightChange(found) if isinstance(found, Change) else found
