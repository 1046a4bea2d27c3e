"""Calibration of nulls: how often each is wrong about strangers and right about kin, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from ...measure.hidden_states import FingerprintProbe, hidden_states
from ...measure.next_tokens import share_interval
from ...metrics.config import LineageTestConfig, Null
from ...metrics.seedprint import Fingerprint
from ...models.birth import born
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...report.pictures.style import MUTED, REFERENCE, RUN_COLOURS, add_legend, in_figure_style, legend_line, new_figure
from ...trainer.by_name.model_names import ModelSource
from ...trainer.devices import device
from ...trainer.module import next_token_loss
from .comparison import Evidence, compare_evidence, evidence_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Names of all nulls.
NULLS: tuple[Null, ...] = get_args(Null)
#: Optimizer steps on random tokens that turn a birth into its kin, where no runs are given.
KIN_STEPS = 30


@dataclass(frozen=True)
class KinRate:
    """Number of some pairs that a null calls kin."""

    n: int
    """Pairs."""
    n_undefined: int
    """Pairs that could not be tested."""
    n_kin: int
    """Pairs called kin."""
    sd_z: float
    """Standard deviation of z over the tested pairs; between strangers it should be 1."""

    @property
    def n_defined(self) -> int:
        """Pairs that were tested."""
        return self.n - self.n_undefined

    @property
    def rate(self) -> float:
        """Fraction of the tested pairs called kin; NaN without any."""
        return self.n_kin / self.n_defined if self.n_defined else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the rate; NaN if no pair was tested."""
        return share_interval(self.n_kin, self.n_defined)

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.interval[1]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON; undefined values are null."""
        values = asdict(self) | {"rate": self.rate, "low": self.low, "high": self.high}
        return {name: None if value != value else value for name, value in values.items()}


@dataclass(frozen=True)
class NullRates:
    """Rates at which one null calls strangers kin, and kin kin."""

    null: str
    strangers: KinRate
    kin: KinRate


def _kin_rate(found: Sequence[Fingerprint]) -> KinRate:
    z = [f.z for f in found if f.verdict != "undefined"]
    sd = float(np.std(z, ddof=1)) if len(z) > 1 else float("nan")
    return KinRate(len(found), len(found) - len(z), sum(f.verdict == "kin" for f in found), sd)


def kin_by_training(
    config: ModelConfig, seed: int, probe: FingerprintProbe, evidence: Callable[[Decoder], Evidence]
) -> tuple[Evidence, Evidence]:
    """Take evidence of a birth before and after a few optimizer steps on random tokens: AdamW, lr 1e-3, 16 sequences a
    step.
    """
    model = born(config, seed, device())
    before = evidence(model)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model.train()
    for _ in range(KIN_STEPS):
        batch_BT = torch.from_numpy(rng.integers(0, config.vocab_size, (16, probe.seq_len + 1))).to(device())
        optimizer.zero_grad()
        next_token_loss(model, batch_BT).objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before, evidence(model)


def calibrate(
    config: ModelConfig,
    n_pairs: int,
    kin: Sequence[tuple[ModelSource, ModelSource]],
    n_kin: int,
    probe: FingerprintProbe,
    recipe: LineageTestConfig,
    nulls: Sequence[Null] = NULLS,
    advance: Callable[[int], object] = lambda n_pairs: None,
) -> tuple[FingerprintProbe, list[NullRates]]:
    """Compute the rates of every null over pairs of births from other seeds, and over kin.

    No birth is in two pairs, so that the intervals hold.

    Args:
        config: model of the births.
        n_pairs: pairs of strangers.
        kin: pairs of models that are kin; without any, births are trained briefly.
        n_kin: number of births trained so.
        probe: inputs of all models.
        recipe: recipe of the tests, except for the null.
        nulls: the nulls to calibrate.
        advance: called after every pair.

    Returns:
        The common probe, adapted to a birth; the rates, by null.
    """

    def tests(pairs: Iterator[tuple[Evidence, Evidence]]) -> list[list[Fingerprint]]:
        """Test every pair under every null; return the tests by null."""
        rows = []
        for a, b in pairs:
            rows.append(
                [compare_evidence(a, b, replace(recipe, null=null), probe, config.vocab_size) for null in nulls]
            )
            advance(1)
        return [list(column) for column in zip(*rows, strict=True)]

    def evidence(model: Decoder) -> Evidence:
        return evidence_of(model, nulls, lambda model: hidden_states(model, probe))

    def birth(seed: int) -> Evidence:
        return evidence(born(config, seed, device()))

    def loaded(source: ModelSource) -> Evidence:
        return evidence(source.load().to(device()))

    probe = probe.like(born(config, 0, device()))
    strange = tests((birth(2 * i), birth(2 * i + 1)) for i in range(n_pairs))
    related = tests(
        ((loaded(a), loaded(b)) for a, b in kin)
        if kin
        else (kin_by_training(config, seed, probe, evidence) for seed in range(n_kin))
    )
    return probe, [
        NullRates(null, _kin_rate(s), _kin_rate(r)) for null, s, r in zip(nulls, strange, related, strict=True)
    ]


# ---------------------------------------------------------------- picture of a calibration


@in_figure_style
def draw_rates(found: Sequence[NullRates], level: float, title: str) -> Figure:
    """Draw the shares of strangers and of kin that each null calls kin, with 95 % intervals; the dashed line is the
    level.
    """
    figure, (left, right) = new_figure(460, 60 + 26 * len(found), 1, 2, sharey=True)
    places = np.arange(len(found))
    for axes, what, colour, heading in (
        (left, "strangers", RUN_COLOURS[1], "strangers called kin"),
        (right, "kin", RUN_COLOURS[0], "kin called kin"),
    ):
        for place, rate in zip(places, found, strict=True):
            shown = getattr(rate, what)
            if shown.n_defined:
                axes.plot([shown.low, shown.high], [place, place], color=colour, linewidth=1.6)
                axes.plot([shown.rate], [place], "o", color=colour, markersize=4.5)
            note = f"{shown.n_undefined} of {shown.n} undefined" if shown.n_undefined else ""
            axes.annotate(note, (1, place), xycoords=("axes fraction", "data"), xytext=(0, 5), color=MUTED,
                          textcoords="offset points", ha="right", fontsize=6.5)  # fmt: skip
        axes.set_title(heading)
        axes.set_xlabel("share of defined tests, 95 % interval")
    left.set_xscale("symlog", linthresh=level, linscale=0.5)
    left.set_xlim(-0.0005, 1.05)
    left.set_xticks([0, level, 0.1, 1], labels=["0", f"{level:g}", "0.1", "1"])
    left.axvline(level, **REFERENCE)
    right.set_xlim(-0.03, 1.03)
    left.set_yticks(places, labels=[rate.null for rate in found])
    left.set_ylim(len(found) - 0.4, -0.6)
    add_legend(figure, [(title, legend_line(linestyle="none")), (f"level {level:g}", legend_line(**REFERENCE))])
    return figure
