"""Models by any of their names, ready for use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.tokenizer import TextTokenizer
from ..errors import UsageError
from ..measure.config import BATCH_SIZE, SnapshotConfig
from ..measure.find_model import measurable, unwrap
from ..measure.hf.hf_model import WEIGHT_DTYPES
from ..measure.user_metrics import MetricLike
from ..messages import one_line
from ..models.exchange.gguf_header import kinds_in_words
from ..models.user_classes import name_user_code
from ..schema import mistyped, quoted
from ..trainer.by_name.loaded_model import (
    UNKNOWN_STEP,
    LoadedModel,
    default_seq_len,
    load_named,
    measure_loaded,
    text_for,
)
from ..trainer.devices import device
from .display import Displayed
from .snapshots import Snapshot


class Model(Displayed):
    """A model in memory, in evaluation mode, with its config and its tokenizer, if it has one.

    Calling it with token ids ``[B, T]`` gives logits ``[B, T, V]``.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    @property
    def name(self) -> str:
        """Name by which it was loaded."""
        return self.loaded.name

    @property
    def module(self) -> nn.Module:
        """The PyTorch module."""
        return self.loaded.model

    @property
    def config(self) -> Any:
        """Shape of the model; a ``ModelConfig`` for models of this package."""
        return self.loaded.model.config

    @property
    def step(self) -> int:
        """Optimizer steps that it has been trained for; -1 if unknown."""
        return self.loaded.step

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """Tokenizer of the text that it reads; None without one."""
        file = self.loaded.tokenizer_file
        return None if file is None else TextTokenizer.load(file)

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def birth(self) -> Model:
        """Return the model at step 0, before any training.

        Raises:
            UsageError: the birth of the model is unknown.
        """
        if self.loaded.newborn is None:
            raise UsageError(f"{self.name}: its birth is not known; give a run or CONFIG@SEED")
        born = self.loaded.newborn().to(self.loaded.model.device).eval()
        return Model(replace(self.loaded, name=f"birth of {self.name}", model=born, step=0))

    def __call__(self, tokens_BT: Any) -> Tensor:
        """Compute logits ``[B, T, V]`` of token ids ``[B, T]``, without gradients.

        Raises:
            UsageError: no rows of token ids, an id outside of the vocabulary, or more tokens than the model reads.
        """
        ids_BT = _token_ids(tokens_BT, self.config.vocab_size, self.loaded.n_positions)
        with torch.no_grad():
            return self.module(ids_BT.to(self.loaded.model.device))

    def measure(self, **settings: Any) -> Snapshot:
        """Measure it with `birthmark.measure`."""
        return measure(self, **settings)

    def _title(self) -> str:
        trained = "training unknown" if self.step == UNKNOWN_STEP else f"step {self.step:,}"
        return f"Model {self.name}, {trained}"

    def _sentences(self) -> list[str]:
        return ["Not measured yet: measure() says what it is born with, and where its attention sinks are."]

    def _figures(self) -> list[tuple[str, str, str]]:
        config, stored = self.config, self.loaded.stored_kinds
        return [
            ("Parameters", f"{self.n_params:,}", f"stored as {kinds_in_words(stored)}" if stored else ""),
            ("Blocks", str(config.n_layers), f"of {config.n_heads} head{'' if config.n_heads == 1 else 's'}"),
            ("Width", str(config.d_model), f"vocabulary {config.vocab_size:,}"),
        ]


def _token_ids(given: Any, vocab_size: int, n_positions: int | None) -> Tensor:
    """Convert token ids ``[B, T]`` to a tensor of 64-bit integers. A model's own table would report a wrong id as an
    index, and a GPU would take no more work after it.
    """
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        shown = one_line(quoted(given))
        raise UsageError(f"tokens {shown}: give token ids in rows of one length, such as [[1, 2, 3]]") from None
    if ids.ndim != 2 or not ids.numel():
        raise UsageError(f"tokens of shape {list(ids.shape)}: give rows of token ids, such as [[1, 2, 3]]")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"tokens of {ids.dtype}: give integers")
    ids_BT = ids.long()
    if outside := [one for one in map(int, ids_BT.aminmax()) if not 0 <= one < vocab_size]:
        raise UsageError(f"tokens: no token has the id {outside[0]}; give ids from 0 to {vocab_size - 1}")
    if n_positions is not None and ids_BT.shape[1] > n_positions:
        raise UsageError(f"tokens: {ids_BT.shape[1]} in a row, and the model reads {n_positions}; give at most as many")
    return ids_BT


def load(
    name: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    on: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model by any of its names.

    Args:
        name: ``RUN`` (its last checkpoint), ``RUN@STEP`` (``@0`` is its birth), a checkpoint's folder, ``CONFIG@SEED``
            (a birth), a folder of ``transformers``, a GGUF file or a hub id; or a ``Run``.
        dtype: type of the weights.
        on: the device; by default a GPU if there is one.
        trust_remote_code: run the code that a model of ``transformers`` brings, if it brings any.

    Raises:
        UsageError: there is no such model or device, or the model does not run in the type.
        RunError: a damaged file.
    """
    if not isinstance(name, (str, PathLike)):
        raise UsageError(f"{one_line(quoted(name))} is no name of a model; give a text, a path or a run")
    if dtype not in WEIGHT_DTYPES:
        *dtypes, last = WEIGHT_DTYPES
        raise UsageError(f"dtype {quoted(dtype)}: give {', '.join(map(str, dtypes))} or {last}")
    place = device() if on is None else _device(on)
    loaded = load_named(fspath(name), dtype, trust_remote_code=trust_remote_code)
    loaded.model.to(place).eval()
    return Model(loaded)


def _device(on: torch.device | str) -> torch.device:
    try:
        found = torch.device(on)
    except (RuntimeError, TypeError):
        raise UsageError(f"on {quoted(on)}: no device; give cpu, cuda or cuda:1") from None
    if found.type == "meta":
        raise UsageError("on meta: tensors have no values there; give cpu, cuda or cuda:1")
    if found.type == "cuda" and (found.index or 0) >= (n_gpus := torch.cuda.device_count()):
        raise UsageError(f"on {found}: this machine has {n_gpus} GPUs; give another device")
    try:
        torch.empty(0, device=found)
    # Each kind of device that torch was built without raises an error of its own.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"on {found}: {one_line(error, 120)}; give cpu, cuda or cuda:1") from None
    return found


def measure(
    model: Model | nn.Module | str | PathLike[str],
    *,
    birth: Model | nn.Module | None = None,
    n_sequences: int = SnapshotConfig.n_sequences,
    seq_len: int | None = None,
    probe_seed: int = 0,
    batch_size: int = BATCH_SIZE,
    sink_epsilon: float = SnapshotConfig.sink_epsilon,
    metrics: Sequence[MetricLike] = (),
    text: str | Sequence[str] | None = None,
    gradients: bool = False,
) -> Snapshot:
    """Measure a model's biases on random tokens, and on text if given, like ``birthmark snapshot``. The model is left
    unchanged.

    Args:
        model: a loaded one, or any name that `load` takes; our decoder or a causal language model of ``transformers``.
        birth: reference to compare with; by default the model's own birth, where that is known.
        n_sequences: sequences in the probe.
        seq_len: tokens in each; by default 64, or as many as the model reads.
        probe_seed: decides the sequences.
        batch_size: sequences in one forward pass.
        sink_epsilon: importance from which on a key is a sink.
        metrics: your own: ``module:Class``, classes or instances (docs/extending.md).
        text: files or folders of text, which the model's own tokenizer reads; sinks are often larger there.
        gradients: measure the loss gradient too, on the text if there is some.

    Raises:
        UsageError: a model that cannot be measured, or an impossible setting.
        RunError: the model gives NaN or inf, or one of your metrics fails.
    """
    loaded = loaded_of(model)
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise UsageError(f"metrics {one_line(quoted(metrics))}: give a list of metrics")
    if birth is not None:
        reference = loaded_of(birth).model
        if (of_birth := _shape_in_words(reference)) != (asked := _shape_in_words(loaded.model)):
            raise UsageError(f"birth has {of_birth}, the model {asked}; give a birth of the same shape")
        loaded = replace(loaded, newborn=lambda: reference)
    settings = checked_settings(
        loaded.n_positions,
        n_sequences=n_sequences,
        seq_len=default_seq_len(loaded) if seq_len is None else seq_len,
        probe_seed=probe_seed,
        batch_size=batch_size,
        sink_epsilon=sink_epsilon,
        gradients=gradients,
    )
    probe = None if text is None else text_for(loaded, settings, [text] if isinstance(text, str) else text)
    name_user_code([metric for metric in metrics if isinstance(metric, str)])
    return Snapshot(measure_loaded(loaded, settings, settings.probe_seed, metrics, probe), loaded.name)


def _shape_in_words(model: Any) -> str:
    return f"{model.config.n_layers} blocks of width {model.config.d_model}, vocabulary {model.config.vocab_size:,}"


def loaded_of(model: Model | nn.Module | str | PathLike[str]) -> LoadedModel:
    """Return the :class:`LoadedModel` of a model in memory or by name."""
    if isinstance(model, (str, PathLike)):
        return load(model).loaded
    if isinstance(model, Model):
        return model.loaded
    inner = unwrap(model)
    if isinstance(inner, nn.Module) and any(parameter.is_meta for parameter in inner.parameters()):
        raise UsageError(f"{type(inner).__name__}: lies on the device meta, where tensors have no values; give it some")
    return LoadedModel(type(inner).__name__, measurable(inner), None, UNKNOWN_STEP, None)


def checked_settings(n_positions: int | None = None, **fields: Any) -> SnapshotConfig:
    """Build the settings of a measurement from arguments by their names.

    Args:
        n_positions: tokens that the model can read at once; None: any number.
        fields: fields of `SnapshotConfig`.

    Raises:
        UsageError: a value is of another kind, or impossible; the message names the argument.
    """
    settings = SnapshotConfig(**{name: plain(value) for name, value in fields.items()})
    if problems := mistyped(settings) or settings.problems(n_positions):
        raise UsageError("; ".join(problem.removeprefix("snapshot.") for problem in problems))
    return settings


def plain(value: Any) -> Any:
    """Convert numpy's numbers to Python's."""
    return value.item() if isinstance(value, np.generic) else value
