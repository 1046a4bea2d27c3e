"""Ablations of what a sink seems to rest on, each beside controls of the same kind that a seed draws.

With k controls, a figure that exceeds all of them would do so by chance once in k + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...measure.config import SnapshotConfig
from ...measure.intervention_kinds import Fill, Intervention
from ...measure.interventions import Intervened, PassFigures, intervene
from ...trainer.by_name.loaded_model import load_named, text_for

#: Controls of each ablation.
N_CONTROLS = 5


class Suspect(NamedTuple):
    """Layer and units that seem to carry the sink of a model."""

    layer: int
    """Block whose MLP writes the massive channel, from 1."""
    units: tuple[int, ...]
    """Its hidden units that write it, the largest first."""
    layers: tuple[int, ...]
    """Every block with such units."""
    all_units: tuple[int, ...]
    """The units of all of them."""
    channel: int
    """The massive channel."""


def ablation(name: str, file: Path, suspect: Suspect, text: Path, settings: SnapshotConfig) -> dict[str, Any]:
    """Ablate one suspect and its controls while the model reads text.

    Args:
        name: one of :data:`ABLATIONS`.
        file: GGUF file of the model.
        suspect: its suspects.
        text: folder of texts.
        settings: the probe's size.

    Returns:
        Attention to key 0 and loss without and with the ablation, the same of every control, and a summary.
    """
    loaded = load_named(str(file))
    probe = text_for(loaded, settings, [str(text)])
    alone: dict[tuple[int, ...], PassFigures] = {}

    def figures(what: Intervention) -> dict[str, Any]:
        done = intervene(
            loaded.model, probe.tokens_NT, what, documents_NT=probe.documents_NT, is_text=True,
            batch_size=settings.on_any_device, alone=alone.get(what.watched),
        )  # fmt: skip
        alone[what.watched] = done.passes[0]
        return _figures(done)

    what, controls = ABLATIONS[name](_Setting(loaded.model.config, suspect, settings.seq_len))
    row, others = figures(what), [figures(control) for control in controls]
    for one in others:
        del one["key_0_by_block"]
    return row | {"controls": others, "of_controls": _summary(row, others)}


class _Setting(NamedTuple):
    """Settings of an ablation and its controls."""

    config: Any
    suspect: Suspect
    seq_len: int

    def drawn(self, n: int, avoided: tuple[int, ...], each: int = 1) -> list[tuple[int, ...]]:
        """Draw N_CONTROLS sets of numbers below n."""
        free = np.setdiff1d(np.arange(n), avoided)
        chosen = np.random.default_rng(0).choice(free, (N_CONTROLS, each), replace=False)
        return [tuple(sorted(map(int, numbers))) for numbers in chosen]

    def every(self) -> tuple[int, ...]:
        """List all blocks."""
        return tuple(range(1, self.config.n_layers + 1))


#: An ablation, and its controls.
_Planned = tuple[Intervention, list[Intervention]]


def _unit(at: _Setting, fill: Fill | None) -> _Planned:
    """Ablate the largest unit."""
    what = Intervention("ablate_unit", (at.suspect.layer,), units=at.suspect.units[:1], fill=fill)
    return what, [replace(what, units=one) for one in at.drawn(at.config.ff, at.suspect.all_units)]


def _units(at: _Setting) -> _Planned:
    """Ablate all units that write the channel."""
    units = tuple(sorted(at.suspect.all_units))
    what = Intervention("ablate_unit", at.suspect.layers, units=units)
    return what, [replace(what, units=some) for some in at.drawn(at.config.ff, units, len(units))]


def _channel(at: _Setting, everywhere: bool) -> _Planned:
    """Ablate the massive channel after its block, or after every block."""
    layers, channel = at.every() if everywhere else (at.suspect.layer,), (at.suspect.channel,)
    what = Intervention("ablate_channel", layers, channels=channel)
    return what, [replace(what, channels=one) for one in at.drawn(at.config.d_model, channel)]


def _value(at: _Setting) -> _Planned:
    """Ablate the value of key 0 in every block; controls are keys of the first half."""
    what = Intervention("ablate_value", at.every(), positions=(0,))
    return what, [replace(what, positions=one) for one in at.drawn(at.seq_len // 2, (0,))]


ABLATIONS: Mapping[str, Callable[[_Setting], _Planned]] = {
    "unit_zero": lambda at: _unit(at, None),
    "unit_mean": lambda at: _unit(at, "mean"),
    "units_zero": _units,
    "channel_zero": lambda at: _channel(at, False),
    "channel_zero_everywhere": lambda at: _channel(at, True),
    "value_zero": _value,
}


def _figures(found: Intervened) -> dict[str, Any]:
    """List the figures of one ablation; attention is of the queries behind the watched key."""
    what = found.what
    alone, changed = (figures.attention_to_first[..., 0].mean(1) for figures in found.passes)
    behind = slice(max(what.layers) if len(what.layers) < len(alone) else 0, None)
    chosen = what.units or what.channels or what.positions
    return {
        "layers": list(what.layers), "chosen": list(chosen),
        "key_0": [float(alone.mean()), float(changed.mean())],
        "key_0_in_later_blocks": [float(alone[behind].mean()), float(changed[behind].mean())],
        "key_0_by_block": [alone.tolist(), changed.tolist()],
        "largest_channel": [float(np.abs(figures.channel_value[:, 0]).max()) for figures in found.passes],
        "loss": found.loss(0), "loss_increase": found.loss_increase(1),
    }  # fmt: skip


def _summary(row: dict[str, Any], controls: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Summarise sizes of changes: the ablation's, the controls' median and largest, and how many controls reach it."""
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "key_0": lambda figures: abs(figures["key_0"][1] - figures["key_0"][0]),
        "key_0_in_later_blocks": lambda figures: abs(
            figures["key_0_in_later_blocks"][1] - figures["key_0_in_later_blocks"][0]
        ),
        "loss": lambda figures: abs(figures["loss_increase"][0]),
    }
    found = {}
    for name, measure in measures.items():
        sizes, own = [measure(control) for control in controls], measure(row)
        found[name] = {
            "change": own, "median": float(np.median(sizes)), "largest": max(sizes),
            "as_large": sum(size >= own for size in sizes),
        }  # fmt: skip
    return found
