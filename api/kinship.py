"""The lineage test of two models."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from ..errors import UsageError
from ..measure.find_model import measurable, unwrap
from ..measure.foreign import ForeignModel
from ..measure.hidden_states import FingerprintProbe
from ..metrics.config import LineageTestConfig
from ..metrics.seedprint import Fingerprint
from ..models.by_block import HeldWeights
from ..models.decoder import Decoder
from ..schema import mistyped
from ..study.lineage.comparison import check_comparable, check_probe, choose_probe, compare_models
from ..study.lineage.options import ProbeOptions
from ..trainer.by_name.model_names import AnySource, ForeignSource, ModelSource, open_any_source
from .model import Model


def fingerprint(
    a: Model | nn.Module | str | PathLike[str],
    b: Model | nn.Module | str | PathLike[str],
    *,
    probe: Literal["token", "embedding"] = "token",
    n_inputs: int = FingerprintProbe.n_inputs,
    seq_len: int | None = None,
    probe_seed: int = 0,
    cache_dir: str | Path | None = None,
    **settings: Any,
) -> Fingerprint:
    """Test if two models share a birth (docs/lineage.md), like ``birthmark fingerprint``.

    Args:
        a: a model, or any name that `load` takes; our own architecture, or one of ``transformers``.
        b: the other.
        probe: inputs of both: random tokens, or Gaussian vectors in place of embeddings.
        n_inputs: sequences that they are shown.
        seq_len: tokens in each; by default 64, or as many as both can read.
        probe_seed: decides the sequences.
        cache_dir: folder that keeps hidden states for the next test; by default they are not kept.
        settings: fields of ``LineageTestConfig``, such as ``null="analytic"``.

    Returns:
        ``verdict`` (``kin``, ``stranger``, ``undefined``), ``z``, ``log10_p``, ``statistic`` and what they rest on.

    Raises:
        UsageError: models that cannot be compared, or an impossible setting; it names the setting and its choices.
    """
    known = LineageTestConfig.__dataclass_fields__
    if unknown := [name for name in settings if name not in known]:
        raise UsageError(f"{unknown[0]}: no such setting; there are {', '.join(known)}")
    how = LineageTestConfig(**{name: _plain(value) for name, value in settings.items()})
    asked = ProbeOptions(*map(_plain, (probe, n_inputs, seq_len, probe_seed)))
    if problems := mistyped(asked) + how.problems():
        raise UsageError("; ".join(problems))
    check_probe(how, asked.probe)
    sources = [_source(model) for model in (a, b)]
    shown = FingerprintProbe(kind=asked.probe, n_inputs=asked.n_inputs, probe_seed=asked.probe_seed)
    check_comparable(sources, shown)
    shown = choose_probe(shown, asked.seq_len, [source.config for source in sources])
    with ExitStack() as held:
        cache = held.enter_context(tempfile.TemporaryDirectory()) if cache_dir is None else cache_dir
        (pair,) = compare_models(sources, shown, how, Path(cache)).pairs
    return pair.fingerprint


def _plain(value: Any) -> Any:
    """Convert numpy's numbers to Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _source(model: Model | nn.Module | str | PathLike[str]) -> AnySource:
    if isinstance(model, (str, PathLike)):
        return open_any_source(fspath(model))
    name, module, tokenizer = type(model).__name__, model, None
    if isinstance(model, Model):
        name, module, tokenizer = model.name, model.module, model.loaded.tokenizer_file
    inner = unwrap(module)
    if isinstance(inner, Decoder):
        return ModelSource(name, inner.config, lambda: inner, tokenizer, lambda: HeldWeights(inner))
    seen = measurable(inner)
    assert isinstance(seen, ForeignModel)
    return ForeignSource(name, seen.config, lambda: seen, tokenizer)
