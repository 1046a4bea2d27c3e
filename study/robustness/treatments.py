"""Treatments of a trained model in a study of robustness: changes of weights, and changes that train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ...errors import UsageError
from ...models.adapters.adapter_config import AdapterConfig
from ...models.adapters.attach import attach, initialize_adapter
from ...models.adapters.merged_lora import merged
from ...models.changes.change import Change, ModelWeights, decoder_of, weights_of
from ...models.changes.table import CHANGES, read_kind
from ...models.changes.vocabulary import first_tokens
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from .bases import Base, Text
from .short_training import towards, train

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
    """A change of weights (`birthmark.models.changes`)."""

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
