"""Interventions: results of a model while blocks of it are changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import nn

from ..errors import UsageError
from ..findings.formatting import format_value
from ..findings.interventions import intervention_in_words, intervention_sentence
from ..measure.config import BATCH_SIZE, SnapshotConfig
from ..measure.intervention_kinds import Around, Fill, Intervention, KindName
from ..measure.interventions import Intervened
from ..schema import mistyped, quoted
from ..trainer.by_name.intervention_probe import ProbeName, intervene_on
from .display import Displayed
from .model import Model, checked_settings, loaded_of
from .named_array import NamedArray, no_such

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..report.notebook import Captioned
    from ..report.table import Table


#: Figures by block → the label of each.
_FIGURES = {
    "attention": "attention to the key",
    "attention_to_first": "attention to key 0",
    "state_norm": "norm of the state",
    "channel": "largest channel of the state",
    "channel_value": "its value",
    "norm_before": "norm of what heads aggregate, before the change",
    "norm_after": "norm of what heads aggregate",
}


class InterventionResult(Displayed):
    """Figures of a model unchanged and changed: ``found["attention"].sel(dose=8, layer=3)``.

    The dose of the unchanged model is NaN and comes first; a kind without doses has the dose 1 for the changed model.
    """

    def __init__(self, found: Intervened, model: str) -> None:
        self.found, self.model = found, model

    @property
    def sentence(self) -> str:
        """Outcome in one sentence, as printed by the command."""
        return intervention_sentence(self.found)

    def __getitem__(self, name: str) -> NamedArray:
        """Select a figure by its name.

        ``attention`` and ``attention_to_first`` have ``dose``, ``layer``, ``head`` and ``position``. ``state_norm``,
        ``channel``, ``channel_value``, ``norm_before`` and ``norm_after`` have ``dose``, ``layer`` and ``position``.

        Raises:
            UsageError: there is no such figure.
        """
        if name not in _FIGURES:
            raise no_such("figure", name, list(_FIGURES))
        values = self.found.stacked(name)
        doses = np.array([np.nan if figures.dose is None else figures.dose for figures in self.found.passes])
        coords = {"dose": doses, "layer": np.arange(1, values.shape[1] + 1)}
        if values.ndim == 4:
            coords["head"] = np.arange(values.shape[2])
        coords["position"] = np.array(self.found.keys)
        return NamedArray(values, tuple(coords), coords, name, _FIGURES[name])

    @property
    def loss(self) -> list[float]:
        """Mean loss of every pass, nats per token, that of the unchanged model first.

        Raises:
            UsageError: the model was shown random tokens.
        """
        found = [loss for number in range(len(self.found.passes)) if (loss := self.found.loss(number)) is not None]
        if not found:
            raise UsageError("loss: the model was shown random tokens; intervene with text=")
        return [mean for mean, _ in found]

    def draw(self) -> Figure:
        """Draw the picture of the command."""
        from ..report.figure import draw_panels
        from ..report.pictures.single_commands import titled_panels

        return draw_panels(titled_panels(self.found, self.model))

    def _title(self) -> str:
        return f"{self.model}: {intervention_in_words(self.found.what)}"

    def _sentences(self) -> list[str]:
        return [self.sentence]

    def _table(self) -> Table:
        from ..report.table import Column, Table

        names = {"attention": ".3f", "attention_to_first": ".3f", "state_norm": ",.0f"}
        arrays = {name: self[name] for name in names}
        rows = []
        for dose in range(len(self.found.passes)):
            for place, key in enumerate(self.found.keys):
                means = [float(np.nanmean(arrays[name].isel(dose=dose, position=place).values)) for name in names]
                value = arrays["attention"].coords["dose"][dose]
                changed = format_value(value, "g") if len(self.found.what.doses) > 1 else "changed"
                rows.append(["unchanged" if np.isnan(value) else changed, key, *means])
        columns = [Column(f"{_FIGURES[name]}, mean", format=spec) for name, spec in names.items()]
        return Table([Column("dose", "name"), Column("position"), *columns], rows)

    def _pictures(self) -> list[Captioned]:
        from ..report.pictures.single_commands import dose_panels

        return [(panel, f"{panel.title}, by dose.") for panel in dose_panels(self.found)]


def intervene(
    model: Model | nn.Module | str | PathLike[str],
    kind: KindName,
    *,
    layers: int | Sequence[int] | Literal["all"],
    positions: int | Sequence[int] = (),
    lambdas: float | Sequence[float] | None = None,
    around: Around | None = None,
    matched: bool = False,
    units: int | Sequence[int] = (),
    channels: int | Sequence[int] = (),
    heads: int | Sequence[int] = (),
    fill: Fill | None = None,
    probe: ProbeName | None = None,
    text: str | Sequence[str] | None = None,
    n_sequences: int = 64,
    seq_len: int = SnapshotConfig.seq_len,
    probe_seed: int = 0,
    batch_size: int = BATCH_SIZE,
) -> InterventionResult:
    """Read a probe with a model unchanged, and with blocks of it changed, like ``birthmark intervene``.

    The model is left unchanged.

    Args:
        model: a loaded one, or any name that `load` takes; a decoder or a causal language model of ``transformers``.
        kind: ``mask``, ``amplify``, ``scale``, ``ablate_unit``, ``ablate_channel``, ``ablate_head`` or
            ``ablate_value`` (docs/measuring.md).
        layers: blocks, from 1, all changed at once; or ``all``.
        positions: from 0; units, channels and heads are ablated at every one if none is given.
        lambdas: doses of amplify and scale; by default 1, 2, 4 and 8.
        around: centre from which amplify moves away: ``outputs``, the default, or ``values``.
        matched: for scale, give the heads' aggregation the norm that amplify of the same dose would.
        units: hidden units of the MLP, from 0.
        channels: channels of the residual stream, from 0.
        heads: query heads, from 0.
        fill: replacement of an ablated part: ``zero``, the default, or ``mean``.
        probe: ``random``, ``bos``, ``text`` or ``text_without_bos``; by default text if given.
        text: files or folders of text, read by the model's own tokenizer.
        n_sequences: sequences in the probe.
        seq_len: tokens in each.
        probe_seed: seed of random tokens.
        batch_size: sequences in one forward pass.

    Raises:
        UsageError: an intervention or a probe that is impossible.
        RunError: the model gives NaN or inf, or a dose makes states whose norm its precision does not hold.
    """
    loaded = loaded_of(model)
    settings = checked_settings(
        loaded.n_positions, n_sequences=n_sequences, seq_len=seq_len, probe_seed=probe_seed, batch_size=batch_size
    )
    every = range(1, loaded.model.config.n_layers + 1)
    if lambdas is not None and not (doses := _several("lambdas", lambdas, Real, "numbers")):
        raise UsageError("lambdas: give one dose at least, or leave it out")
    what = Intervention(
        kind,
        tuple(every) if isinstance(layers, str) and layers == "all" else _whole("layers", layers),
        _whole("positions", positions),
        None if lambdas is None else tuple(map(float, doses)),
        around,
        matched,
        _whole("units", units),
        _whole("channels", channels),
        _whole("heads", heads),
        fill,
    )
    if problems := mistyped(what):
        raise UsageError("; ".join(problems))
    given = [text] if isinstance(text, str) else text
    chosen = probe or ("random" if given is None else "text")
    return InterventionResult(
        intervene_on(loaded, what, settings, chosen, text=given, probe_seed=settings.probe_seed), loaded.name
    )


def _whole(name: str, given: int | Sequence[int] | str) -> tuple[int, ...]:
    """Return one whole number or several as a tuple, each once, rising; UsageError if it is anything else."""
    what = "whole numbers, or 'all'" if name == "layers" else "whole numbers"
    return tuple(sorted({int(number) for number in _several(name, given, Integral, what)}))


def _several(name: str, given: Any, kind: type, what: str) -> list[Any]:
    """Return one number or several as a list, each of ``kind``, an abstract one that numpy's numbers have too.

    Raises:
        UsageError: ``given`` has something else, such as a word.
    """
    if isinstance(given, np.ndarray):
        given = given.tolist()
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    # True counts as 1 in Python.
    if not all(isinstance(number, kind) and not isinstance(number, bool) for number in found):
        raise UsageError(f"{name} {quoted(given)}: give {what}")
    return found
