"""Several models beside one another, and the lineage test of two."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from ..errors import UsageError
from ..findings.formatting import format_p, format_value
from ..measure.config import BATCH_SIZE, SnapshotConfig
from ..measure.find_model import measurable, unwrap
from ..measure.hf import HFModel
from ..measure.hidden_states import FingerprintProbe
from ..measure.model_pairs import Compared
from ..metrics.config import LineageTestConfig
from ..metrics.seedprint import Fingerprint
from ..models.by_block import HeldWeights
from ..models.decoder import Decoder
from ..schema import SchemaError, check, mistyped
from ..study.lineage.answer import answer_of_models, short_names
from ..study.lineage.comparison import check_comparable, check_probe, choose_probe, compare_models
from ..study.lineage.options import ProbeOptions
from ..trainer.by_name.comparison import Comparer, comparison_problems
from ..trainer.by_name.model_names import AnySource, HFSource, ModelSource, open_any_source
from .display import Displayed
from .model import Model, checked_settings, loaded_of, plain
from .named_array import NamedArray, no_such


class Comparison(Displayed):
    """Results for every pair of some models: ``comparison.kl.sel(model="a", other="b")``.

    Arrays have the models' names as coordinates. Layers count from 0, the embedding output.
    """

    def __init__(self, compared: Compared, probe: dict[str, Any]) -> None:
        self.compared, self.probe = compared, probe

    @property
    def models(self) -> list[str]:
        """Names, in the order given."""
        return self.compared.pairs.names

    def _between(self, values: np.ndarray, name: str, label: str, unit: str = "") -> NamedArray:
        names = np.array(self.models)
        coords = {"model": names, "other": names}
        if values.ndim == 3:
            coords["position"] = np.arange(values.shape[2])
        return NamedArray(values, tuple(coords), coords, name, label, unit)

    @property
    def cka(self) -> NamedArray:
        """CKA of the states after the last blocks: ``model``, ``other``."""
        return self._between(self.compared.pairs.last_cka(), "cka", "CKA of the last states")

    def cka_by_layer(self, model: str, other: str) -> NamedArray:
        """Return CKA of every layer of one with every layer of another: ``layer``, ``other_layer``."""
        for name in (model, other):
            if name not in self.models:
                raise no_such("model", name, self.models)
        a, b = self.models.index(model), self.models.index(other)
        found = self.compared.pairs.cka_by_layer
        values = found[a, b] if (a, b) in found else found[b, a].T
        coords = {axis: np.arange(n) for axis, n in zip(("layer", "other_layer"), values.shape, strict=True)}
        return NamedArray(values, tuple(coords), coords, "cka_by_layer", f"CKA of {model} and {other}")

    @property
    def kl(self) -> NamedArray:
        """``KL(model ‖ other)`` of next-token predictions in nats: ``model``, ``other``, ``position``."""
        return self._between(self.compared.pairs.kl_AAT, "kl", "KL(model ‖ other)", "nats per token")

    @property
    def kl_standard_error(self) -> NamedArray:
        """Standard error of the mean of `kl` over positions, from the spread over sequences: ``model``, ``other``."""
        return self._between(self.compared.pairs.kl_se_AA, "kl_standard_error", "standard error", "nats per token")

    @property
    def loss(self) -> NamedArray:
        """Loss on the token after each position, NaN where the model does not predict it: ``model``, ``position``.

        Raises:
            UsageError: the models were shown random tokens.
        """
        values = self.compared.pairs.loss_AT
        if values is None:
            raise UsageError("loss: the models were shown random tokens; compare them with text=")
        coords = {"model": np.array(self.models), "position": np.arange(values.shape[1])}
        return NamedArray(values, tuple(coords), coords, "loss", "loss", "nats per token")

    @property
    def barriers(self) -> dict[tuple[str, str], float]:
        """Rise of the loss on the straight line between two models' weights, in nats, by pair of names."""
        return {(self.models[x.a], self.models[x.b]): x.barrier.height for x in self.compared.lines}

    def _title(self) -> str:
        return f"Between models {', '.join(self.models)}"

    def __repr__(self) -> str:
        from ..report.compared_models import print_compared
        from ..report.terminal import printed

        return printed(lambda console: print_compared([self.compared], self.probe, console), width=120)

    def _repr_html_(self) -> str:
        from ..report.notebook import comparison_html

        return comparison_html(self.compared)


def compare(
    *models: Model | nn.Module | str | PathLike[str],
    n_sequences: int = SnapshotConfig.n_sequences,
    seq_len: int | None = None,
    probe_seed: int = 0,
    batch_size: int = BATCH_SIZE,
    minibatch: int = 256,
    text: str | list[str] | None = None,
    barrier: int | None = None,
) -> Comparison:
    """Compare models in their hidden states and predictions (definitions §15), like ``birthmark compare``.

    Args:
        models: two or more, each in memory or by any name that `load` takes; all with one vocabulary.
        n_sequences: sequences that they are shown.
        seq_len: tokens in each; by default 64, or as many as the first model reads.
        probe_seed: decides random sequences.
        batch_size: sequences in one forward pass.
        minibatch: sequences whose states CKA compares at a time; it is the mean over such minibatches.
        text: files or folders of text to read in place of random tokens.
        barrier: also measure the loss at so many points on the straight line between every pair's weights, on ``text``.

    Raises:
        UsageError: models that cannot be compared, or an impossible setting.
        RunError: a damaged file.
    """
    if len(models) < 2:
        raise UsageError(f"{len(models)} models: give at least two")
    if barrier is not None and text is None:
        raise UsageError(f"barrier {barrier}: a loss needs text; give text=")
    settings = checked_settings(n_sequences=n_sequences, batch_size=batch_size, probe_seed=probe_seed)
    minibatch, barrier, seq_len = plain(minibatch), plain(barrier), plain(seq_len)
    try:
        check({"minibatch": minibatch}, dict[str, int])
        check({"barrier": barrier, "seq_len": seq_len}, dict[str, int | None])
    except SchemaError as error:
        raise UsageError(str(error)) from None
    if problems := comparison_problems(settings.n_sequences, minibatch, barrier):
        raise UsageError("; ".join(problems))
    given = {}
    for model in models:
        name = fspath(model) if isinstance(model, (str, PathLike)) else loaded_of(model).name
        if name in given:
            raise UsageError(f"{name}: was given twice; give each model once, modules as bm.load gives them")
        given[name] = model
    data = [text] if isinstance(text, str) else text
    # By name, a model is in memory only while it is read.
    comparer = Comparer(
        settings,
        seq_len,
        minibatch,
        text=text is not None,
        data=data,
        open_model=lambda name: loaded_of(given[name]),
    )
    compared = comparer.compared(list(given), barrier)
    shape = comparer.tokens_NT.shape
    probe = {"kind": "random" if text is None else "text", "n_sequences": shape[0], "seq_len": shape[1]}
    return Comparison(compared, probe)


# ---------------------------------------------------------------- the lineage test of two models


@dataclass(frozen=True, repr=False)
class LineageResult(Displayed, Fingerprint):
    """Result of a lineage test, and its answer in a sentence."""

    sentence: str = ""
    """Answer, as the command prints it."""

    def _title(self) -> str:
        return f"Lineage test: {self.verdict}"

    def _sentences(self) -> list[str]:
        return [self.sentence, *(f"Warning: {warning}." for warning in self.warnings)]

    def _figures(self) -> list[tuple[str, str, str]]:
        return [
            ("z", format_value(self.z, ".1f"), f"p {format_p(self.log10_p)}"),
            ("Rank correlation", format_value(self.statistic, ".4f"), f"over {self.k} columns, {self.n_inputs} inputs"),
        ]


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
) -> LineageResult:
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
        ``sentence``, ``verdict`` (``kin``, ``stranger``, ``undefined``), ``z``, ``log10_p``, ``statistic`` and what
        they rest on.

    Raises:
        UsageError: models that cannot be compared, or an impossible setting; it names the setting and its choices.
    """
    known = LineageTestConfig.__dataclass_fields__
    if unknown := [name for name in settings if name not in known]:
        raise UsageError(f"{unknown[0]}: no such setting; there are {', '.join(known)}")
    how = LineageTestConfig(**{name: plain(value) for name, value in settings.items()})
    asked = ProbeOptions(*map(plain, (probe, n_inputs, seq_len, probe_seed)))
    if problems := mistyped(asked) + how.problems():
        raise UsageError("; ".join(problems))
    check_probe(how, asked.probe)
    sources = [_source(model) for model in (a, b)]
    shown = FingerprintProbe(kind=asked.probe, n_inputs=asked.n_inputs, probe_seed=asked.probe_seed)
    check_comparable(sources, shown)
    shown = choose_probe(shown, asked.seq_len, [source.config for source in sources])
    with ExitStack() as held:
        cache = held.enter_context(tempfile.TemporaryDirectory()) if cache_dir is None else cache_dir
        compared = compare_models(sources, shown, how, Path(cache))
    sentence = answer_of_models(short_names(sources), compared.pairs, compared.strangers)
    return LineageResult(**vars(compared.pairs[0].fingerprint), sentence=sentence)


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
    assert isinstance(seen, HFModel)
    return HFSource(name, seen.config, lambda: seen, tokenizer)
