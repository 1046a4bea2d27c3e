"""`birthmark fingerprint --calibrate`: how often each null is wrong about strangers and right about kin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats

from ...measure.hidden_states import FingerprintProbe, hidden_states
from ...metrics.config import LineageTestConfig, Null
from ...metrics.seedprint import Fingerprint, HiddenStates, compare
from ...models.birth import born
from ...models.config import ModelConfig
from ...trainer.by_name.model_names import Source
from ...trainer.devices import device
from ...trainer.module import next_token_losses

#: Every null there is.
NULLS: tuple[Null, ...] = get_args(Null)
#: Optimizer steps on random tokens that make kin of a birth where no runs are given.
KIN_STEPS = 30


@dataclass(frozen=True)
class Share:
    """How many of some pairs were called kin."""

    n: int
    """Pairs."""
    n_undefined: int
    """Those that had no test."""
    n_kin: int
    """Those called kin."""
    sd_z: float
    """Standard deviation of z over the defined ones; between strangers it should be 1."""

    @property
    def n_defined(self) -> int:
        """Pairs with a test."""
        return self.n - self.n_undefined

    @property
    def rate(self) -> float:
        """Share of the defined ones called kin; NaN where there are none."""
        return self.n_kin / self.n_defined if self.n_defined else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % interval (Clopper & Pearson 1934)."""
        if not self.n_defined:
            return float("nan"), float("nan")
        found = stats.binomtest(self.n_kin, self.n_defined).proportion_ci(0.95, method="exact")
        return float(found.low), float(found.high)

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.interval[1]

    def told(self) -> dict[str, Any]:
        """As JSON says it."""
        values = asdict(self) | {"rate": self.rate, "low": self.low, "high": self.high}
        return {name: None if value != value else value for name, value in values.items()}


@dataclass(frozen=True)
class Rates:
    """What one null does."""

    null: str
    strangers: Share
    kin: Share


def _share(found: Sequence[Fingerprint]) -> Share:
    z = [f.z for f in found if f.verdict != "undefined"]
    sd = float(np.std(z, ddof=1)) if len(z) > 1 else float("nan")
    return Share(len(found), len(found) - len(z), sum(f.verdict == "kin" for f in found), sd)


def _birth(config: ModelConfig, seed: int, probe: FingerprintProbe) -> HiddenStates:
    return HiddenStates(hidden_states(born(config, seed, device()), probe))


def kin_by_training(config: ModelConfig, seed: int, probe: FingerprintProbe) -> tuple[HiddenStates, HiddenStates]:
    """A birth before and after a few optimizer steps on random tokens: AdamW, lr 1e-3, 16 sequences a step."""
    model = born(config, seed, device())
    before = HiddenStates(hidden_states(model, probe))
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model.train()
    for _ in range(KIN_STEPS):
        batch_BT = torch.from_numpy(rng.integers(0, config.vocab_size, (16, probe.seq_len + 1))).to(device())
        optimizer.zero_grad()
        next_token_losses(model, batch_BT).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before, HiddenStates(hidden_states(model, probe))


def calibrate(
    config: ModelConfig,
    n_pairs: int,
    kin: Sequence[tuple[Source, Source]],
    n_kin: int,
    probe: FingerprintProbe,
    recipe: LineageTestConfig,
    nulls: Sequence[Null] = NULLS,
    advance: Callable[[int], object] = lambda n_pairs: None,
) -> list[Rates]:
    """Rates of every null over pairs of births from other seeds, and over kin.

    No birth is in two pairs, so that the intervals hold.

    Args:
        config: of the births.
        n_pairs: pairs of strangers.
        kin: models that are kin, pair by pair; where there are none, births are trained a little.
        n_kin: how many are.
        probe: what all are shown.
        recipe: all but the null.
        nulls: the ones to try.
        advance: is told of every pair that is done.
    """

    def tests(pairs: Iterator[tuple[HiddenStates, HiddenStates]]) -> list[list[Fingerprint]]:
        """Every pair under every null, by null."""
        rows = []
        for a, b in pairs:
            rows.append(
                [
                    compare(a, b, replace(recipe, null=null), probe=probe.kind, vocab_size=config.vocab_size)
                    for null in nulls
                ]
            )
            advance(1)
        return [list(column) for column in zip(*rows, strict=True)]

    def hidden(source: Source) -> HiddenStates:
        return HiddenStates(hidden_states(source.load().to(device()), probe))

    probe = probe.like(born(config, 0, device()))
    strange = tests((_birth(config, 2 * i, probe), _birth(config, 2 * i + 1, probe)) for i in range(n_pairs))
    related = tests(
        ((hidden(a), hidden(b)) for a, b in kin)
        if kin
        else (kin_by_training(config, seed, probe) for seed in range(n_kin))
    )
    return [Rates(null, _share(s), _share(r)) for null, s, r in zip(nulls, strange, related, strict=True)]


def print_rates(found: Sequence[Rates], title: str, console: Console) -> None:
    """A row per null."""
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("null", no_wrap=True)
    for heading in ("strangers, %", "no test", "sd of z", "kin, %", "no test"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rates in found:
        sd = rates.strangers.sd_z
        table.add_row(rates.null, *_cells(rates.strangers), "–" if sd != sd else f"{sd:.2f}", *_cells(rates.kin))
    console.print(table)
    console.print("called kin, of those that had a test, with 95 % intervals", highlight=False)


def _cells(share: Share) -> tuple[str, str]:
    rate, low, high = (f"{100 * value:.1f}".removesuffix(".0") for value in (share.rate, *share.interval))
    return f"{rate} ({low}–{high})" if share.n_defined else "–", f"{share.n_undefined}/{share.n}"
