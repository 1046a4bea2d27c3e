"""The links of the chain in one snapshot, by block, head and position: from the first token's variance to the sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..history import PROBES, arrays_of, number, probes
from ..pictures import curves as pictures
from ..pictures import layers as layer_pictures
from ..pictures.layers import Heights, Panel, Units, block_titles
from ..pictures.panels import log_ticks, position_axis, token_axis
from ..tables import format_value
from . import chain_of_runs as chain
from .one_snapshot import LISTED, Arrays, Measured, by_block, lines, of_blocks, positions
from .over_training import DASHED, SOLID
from .section import Cube, Drawn, List, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def aggregation(page: Measured) -> Section:
    """Variance by position, and how many tokens a query averages over."""
    section = Section(
        "aggregation",
        "Aggregation",
        "σ²(t) is the variance of what attention aggregates at position t, over the sequences of the probe. Of values "
        "that are independent across positions it would be σ²(0)/n_eff(t): what lies above is correlation between the "
        "values.",
    )
    n_layers = page.n_layers

    def variance(arrays: Arrays) -> Drawn:
        return _variance(arrays["positional_variance"], arrays["n_eff"])

    def variance_out(arrays: Arrays) -> Drawn:
        return _variance(arrays["positional_variance_out"], None) if chain.differ(arrays) else None

    caption = of_blocks("Positional variance σ²(t); dashed: the prediction from n_eff, mean over heads.", n_layers)
    page.add(section, "variance", caption, ["positional_variance", "n_eff"], variance)
    caption = of_blocks("σ²(t) of what enters the output projection.", n_layers)
    page.add(section, "variance-out", caption, ["positional_variance_out"], variance_out)

    def tokens(arrays: Arrays) -> Drawn:
        n_eff = arrays["n_eff"]
        t = positions(n_eff.shape[2])
        titles = block_titles(len(n_eff))
        panels = [Panel(title, t + 1, n_eff[layer][:, t], {"uniform attention": t + 1.0}) for layer, title in titles]
        figure = layer_pictures.heads(
            panels,
            run=0,
            heights=Heights("n_eff(t)", log=True, least=1),
            x_axis=lambda axes: token_axis(axes, t[-1] + 1),
        )
        return figure, [lines("n_eff", n_eff, titles, t)]

    page.add(section, "n-eff", of_blocks("Effective number of tokens n_eff(t).", n_layers), ["n_eff"], tokens)

    def discrepancy(arrays: Arrays) -> Drawn:
        names = {"variance_discrepancy": ("value aggregation", SOLID)}
        if chain.differ(arrays):
            names["variance_discrepancy_out"] = ("enters the output projection", DASHED)
        found = {name: chain.visible(arrays[name], 1.0) for name in names if name in arrays}
        if n_layers < 2 or not any(np.isfinite(values).any() for values in found.values()):
            return None
        levels = [pictures.Control("equal variance", [1, n_layers], [1.0, 1.0])]
        return by_block(found, {n: v if len(found) > 1 else ("", SOLID) for n, v in names.items()},
                         "σ²(0) / σ²(late)", 1, levels, log=True)  # fmt: skip

    caption = "Variance discrepancy by block: σ²(0) over its mean at t ≥ T/2."
    page.add(section, "discrepancy", caption, ["variance_discrepancy"], discrepancy)
    section.notes.extend(chain.constant_first(page.snapshot))
    return section


def _variance(sigma: np.ndarray, n_eff: np.ndarray | None) -> Drawn:
    """σ²(t) of every head of ``[L, H, T]``, beside what n_eff predicts of it where that is given."""
    t = positions(sigma.shape[2])
    titles = block_titles(len(sigma))
    panels, cubes = (
        [],
        [lines("positional_variance" if n_eff is not None else "positional_variance_out", sigma, titles, t)],
    )
    for layer, title in titles:
        shown, guides = chain.visible(sigma[layer][:, t]), {}
        if n_eff is not None and np.isfinite(shown[:, 0]).any() and (n_eff[layer] > 0).all():
            # At position 0 a query sees one key only, so that the variance there tells the values' own.
            predicted = np.mean(sigma[layer][:, :1] * n_eff[layer][:, :1] / n_eff[layer][:, t], axis=0)
            guides["σ²(0) / n_eff"] = predicted
            cubes.append(Cube("predicted", predicted, [{"position": t.tolist()}], {"layer": layer + 1}))
        panels.append(Panel(title, t + 1, shown, guides))
    if not any(np.isfinite(panel.lines).any() for panel in panels):
        return None
    figure = layer_pictures.heads(
        panels, run=0, heights=Heights("σ²(t)", log=True), x_axis=lambda axes: token_axis(axes, t[-1] + 1)
    )
    return figure, cubes


def neurons(page: Measured) -> Section:
    """Hidden units at the first position against the others."""
    section = Section(
        "neurons",
        "Super neurons",
        "Hidden units of the MLP at position 0 against the other positions. A super neuron is excited there far more "
        "than its layer's other units (robust z of at least 10), and at least 5 times as much as elsewhere.",
    )

    def scatter(arrays: Arrays) -> Drawn:
        first, others = arrays["activation_first"], arrays["activation_others"]
        every = np.concatenate([first.ravel(), others.ravel()])
        if not np.isfinite(every).all() or not (every > 0).any():
            return None
        is_super = np.zeros(first.shape, dtype=bool)
        np.put_along_axis(is_super, arrays["neuron_index"], arrays["neuron_is_super"], axis=1)
        silent = max(float(every[every > 0].min()), 1e-4 * float(every.max()))
        titles = block_titles(len(first))
        panels, cubes = [], []
        for layer, title in titles:
            n_super = int(arrays["super_neurons"][layer])
            told = f"{title}: {n_super} super" if n_super else title
            panels.append(Units(told, first[layer], others[layer], is_super[layer], silent))
        for (layer, _), panel in zip(titles, panels, strict=True):
            shown = panel.drawn()
            for name, of_units in (("activation_first", panel.first), ("activation_others", panel.others)):
                cubes.append(Cube(name, of_units[shown], [{"unit": shown.tolist()}], {"layer": layer + 1}))
        return layer_pictures.unit_scatter(panels, run=0, ratio=chain.SUPER_RATIO), cubes

    caption = (
        "Mean absolute activation of the hidden units, one of those that lie on one another; marked are the super "
        "neurons among the ten units of largest z."
    )
    needs = ["activation_first", "activation_others", "neuron_index", "neuron_is_super", "super_neurons"]
    page.add(section, "units", of_blocks(caption, page.n_layers), needs, scatter, square=True)
    for prefix in probes(page.snapshot):
        _list_units(page, section, prefix)
    return section


#: Columns of the list of units: array, heading, format.
_UNIT_COLUMNS = (
    ("neuron_first", "at position 0", ".3f"),
    ("neuron_others", "elsewhere", ".3f"),
    ("neuron_ratio", "ratio", "ratio"),
    ("neuron_z", "robust z", ".1f"),
    ("neuron_gate_norm", "gate norm", ".2f"),
    ("neuron_up_norm", "up norm", ".2f"),
    ("neuron_down_sparsity", "down max/mean", ".1f"),
    ("neuron_down_dimension", "writes channel", "d"),
)


def _list_units(page: Measured, section: Section, prefix: str) -> None:
    arrays = arrays_of(page.snapshot, prefix)
    if "neuron_index" not in arrays or any(name not in arrays for name, _, _ in _UNIT_COLUMNS):
        return
    index, z, is_super = arrays["neuron_index"], arrays["neuron_z"], arrays["neuron_is_super"]
    order = np.argsort(-np.nan_to_num(z, nan=-np.inf).ravel(), kind="stable")[:LISTED]
    shown = [column for column in _UNIT_COLUMNS if not np.isnan(arrays[column[0]].astype(float)).all()]
    rows, units = [], []
    for layer, place in zip(*np.unravel_index(order, z.shape), strict=True):
        values = [format_value(float(arrays[name][layer, place]), spec) for name, _, spec in shown]
        rows.append([str(layer + 1), str(index[layer, place]), *values, "yes" if is_super[layer, place] else "no"])
        units.append((int(layer) + 1, int(index[layer, place])))
    axis = {"layer": [layer for layer, _ in units], "unit": [unit for _, unit in units]}
    cubes = [Cube(name, arrays[name].ravel()[order], [axis], page.at(prefix)) for name, _, _ in shown]
    probe = PROBES[prefix]
    section.lists.append(
        List(
            "Units of largest z" + (f", {probe} probe" if prefix else ""),
            ["block", "unit", *(title for _, title, _ in shown), "super"],
            rows,
            f"neurons-list{'-' + probe if prefix else ''}.csv",
            cubes,
        )
    )


def dominance(page: Measured) -> Section:
    """Dominant channels, massive activations, and the rank of the states."""
    section = Section(
        "dominance",
        "Dominant channels",
        "Dominance is the largest channel of a state over its mean one, 1 to d. Massive activations are the largest "
        "values of the residual stream. The spectrum tells over how many directions all states spread.",
    )

    def by_position(arrays: Arrays) -> Drawn:
        ratio = arrays["dominance"]
        t = positions(ratio.shape[1])
        figure = layer_pictures.depth(
            [Panel("", t, ratio[:, t])],
            heights=Heights("dominance ratio", log=True, least=1),
            x_axis=lambda axes: position_axis(axes, int(t[-1]) + 1),
            embeddings=True,
        )
        axes = [{"layer": range(len(ratio))}, {"position": t.tolist()}]
        return figure, [Cube("dominance", ratio[:, t], axes)]

    page.add(section, "position", "Dominance ratio by position and block.", ["dominance"], by_position)

    def massive(arrays: Arrays) -> Drawn:
        value, position = arrays["massive_value"], arrays["massive_position"]
        if not (np.isfinite(value) & (value > 0)).all():
            return None
        return layer_pictures.massive(value, position, run=0), _massive_cubes(arrays)

    caption = "The ten largest absolute values after every block, one per position and channel."
    page.add(section, "massive", caption, ["massive_value", "massive_position", "massive_channel"], massive)

    def spectrum(arrays: Arrays) -> Drawn:
        values = arrays["singular_values"]
        rank = np.unique(np.geomspace(1, values.shape[1], 128).round().astype(int))

        def axis(axes: Axes) -> None:
            axes.set_xscale("log")
            log_ticks(axes.xaxis, 1, values.shape[1])
            axes.set_xlabel("direction, by singular value")

        shown = np.where(values > 1e-6 * values.max(), values, np.nan)[:, rank - 1]
        if not np.isfinite(shown).any():
            return None
        figure = layer_pictures.depth(
            [Panel("", rank, shown)], heights=Heights("singular value", log=True), x_axis=axis, embeddings=True
        )
        return figure, [
            Cube("singular_value", values[:, rank - 1], [{"layer": range(len(values))}, {"rank": rank.tolist()}])
        ]

    page.add(section, "spectrum", "Singular values of the hidden states, by block.", ["singular_values"], spectrum)

    def effective(arrays: Arrays) -> Drawn:
        return by_block({"effective_rank": arrays["effective_rank"]}, {"effective_rank": ("", SOLID)},
                         "effective rank", 0, from_zero=True)  # fmt: skip

    page.add(section, "rank", "Effective rank of the hidden states by block.", ["effective_rank"], effective)
    for prefix in probes(page.snapshot):
        _list_massive(page, section, prefix)
    return section


def _massive_cubes(arrays: Arrays) -> list[Cube]:
    value, position, channel = (arrays[f"massive_{name}"] for name in ("value", "position", "channel"))
    return [
        Cube(
            "massive_value",
            value[layer],
            [
                {
                    "rank": range(1, value.shape[1] + 1),
                    "position": position[layer].tolist(),
                    "channel": channel[layer].tolist(),
                }
            ],
            {"layer": layer},
        )
        for layer in range(len(value))
    ]


def _list_massive(page: Measured, section: Section, prefix: str) -> None:
    arrays = arrays_of(page.snapshot, prefix)
    if any(f"massive_{name}" not in arrays for name in ("value", "position", "channel")):
        return
    value, position, channel = (arrays[f"massive_{name}"] for name in ("value", "position", "channel"))
    order = np.argsort(-np.nan_to_num(value, nan=-np.inf).ravel(), kind="stable")[:LISTED]
    rows = [
        [
            format_value(float(value[at]), ".2f"),
            str(at[0]) if at[0] else "embeddings",
            str(position[at]),
            str(channel[at]),
        ]
        for at in zip(*np.unravel_index(order, value.shape), strict=True)
    ]
    probe = PROBES[prefix]
    section.lists.append(
        List(
            "Massive activations" + (f", {probe} probe" if prefix else ""),
            ["|h|", "block", "position", "channel"],
            rows,
            f"dominance-massive{'-' + probe if prefix else ''}.csv",
            [],  # the picture's file holds them
        )
    )


def lock(page: Measured) -> Section:
    """The first key against the queries."""
    section = Section(
        "lock",
        "QK lock",
        "How well the first token's key meets the queries of a head: the root mean square cosine with the first "
        "principal direction of the queries, and the share of the queries that have a positive dot product with it.",
    )

    def maps(arrays: Arrays) -> Drawn:
        names = {"qk_cosine": "|cos(k₀, u)|", "qk_positive": "share of queries"}
        figure = layer_pictures.head_maps([(title, arrays[name]) for name, title in names.items()], "")
        return figure, [Cube(name, arrays[name], chain.block_head(arrays[name])) for name in names]

    width = chain.head_width(page.snapshot.summary)
    chance = f" Chance level of the cosine: {width**-0.5:.2f}." if np.isfinite(width) else ""
    caption = f"Cosine of the first key with the queries' direction, and share of positive dot products.{chance}"
    page.add(section, "map", caption, ["qk_cosine", "qk_positive"], maps)
    return section


def sink(page: Measured) -> Section:
    """What attention the first token, and every other, gets."""
    section = Section(
        "sink",
        "Attention sink",
        "Sink mass is the mean attention that later queries spend on position 0; the sink rate is the share of "
        "sequences in which position 0 is a sink; importance is the mean attention that a key receives.",
    )
    epsilon = number(page.snapshot.bias.get("sink_epsilon"))

    def maps(arrays: Arrays) -> Drawn:
        shown = {"sink_mass": ("sink mass", arrays["sink_mass"])}
        if "sink_mass_normalised" in arrays:
            shown["sink_mass_normalised"] = ("as a share of the row", arrays["sink_mass_normalised"])
        if "sink_rate" in arrays:
            shown["sink_rate"] = ("sink rate", arrays["sink_rate"] / 100)
        figure = layer_pictures.head_maps(list(shown.values()), "")
        return figure, [Cube(name, arrays[name], chain.block_head(arrays[name])) for name in shown]

    caption = f"Sink mass and sink rate (importance of key 0 above {format_value(epsilon, 'g')}) by block and head."
    page.add(section, "map", caption, ["sink_mass"], maps)

    def rates(arrays: Arrays) -> Drawn:
        grid, epsilons = arrays["sink_rate_grid"], arrays["sink_epsilons"]

        def axis(axes: Axes) -> None:
            axes.set_xlabel("ε")

        figure = layer_pictures.depth(
            [Panel("", epsilons, grid.mean(2).T)], heights=Heights("sink rate (%)", least=0, most=100), x_axis=axis
        )
        axes = [{"epsilon": epsilons.tolist()}, {"layer": range(1, grid.shape[1] + 1)}]
        return figure, [Cube("sink_rate", grid.mean(2), axes)]

    caption = "Sink rate of position 0 by the importance ε that makes a sink, mean over the heads of a block."
    page.add(section, "rate", caption, ["sink_rate_grid", "sink_epsilons"], rates)

    def keys(arrays: Arrays) -> Drawn:
        values = arrays["importance"]
        j = positions(values.shape[2])
        titles = block_titles(len(values))
        uniform = layer_pictures.uniform_importance(values.shape[2])[j]
        panels = [
            Panel(title, j, np.where(values[layer] > 0, values[layer], np.nan)[:, j], {"uniform attention": uniform})
            for layer, title in titles
        ]
        if not any(np.isfinite(panel.lines).any() for panel in panels):
            return None
        figure = layer_pictures.heads(
            panels,
            run=0,
            heights=Heights("importance", log=True, most=1),
            x_axis=lambda axes: position_axis(axes, int(j[-1]) + 1),
        )
        return figure, [lines("importance", values, titles, j)]

    caption = "Importance by key position."
    page.add(section, "keys", of_blocks(caption, page.n_layers), ["importance"], keys)
    for prefix in probes(page.snapshot):
        found = arrays_of(page.snapshot, prefix).get("sink_position")
        if found is not None:
            places, counts = np.unique(found, return_counts=True)
            order = np.argsort(-counts, kind="stable")[:4]
            told = ", ".join(f"position {places[i]} ({counts[i]})" for i in order)
            section.notes.append(f"Heads by their key of largest importance, {PROBES[prefix]} probe: {told}.")
    return section
