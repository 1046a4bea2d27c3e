"""From where on the page says that an effect is there, each with its source (docs/quantities.md is made of it).

Effects are judged by their size and by their control. A threshold is a judgement where its source says "chosen".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..metrics.quantities import LOGGED


@dataclass(frozen=True)
class Threshold:
    """A number that decides between two sentences."""

    value: float
    meaning: str
    """Statement that it decides, in one sentence."""
    source: str
    """Source of the number."""


_P = LOGGED["seedprint/log10_p"].control
assert isinstance(_P, float)

THRESHOLDS: Mapping[str, Threshold] = {
    "learned": Threshold(
        0.05,
        "Nats by which the validation loss must be below the unigram entropy (below its start, where that entropy is "
        "not known), for the model to count as having learned; at ln V or above it has not. Where training "
        "started from a model, validation loss "
        "must have moved as much to count as changed.",
        "chosen: well above the noise of a validation loss over a hundred sequences",
    ),
    "learned_triggers": Threshold(
        0.1,
        "Share of the loss on triggers at birth up to which an arm counts as having learned the backcopy task.",
        "chosen: with one block, arms that learn it end at .001 to .013 of it after 2000 steps, those that do not at "
        ".20 to .64 (docs/results/sinks.md); shorter runs and two blocks fall between",
    ),
    "contraction": Threshold(
        0.05,
        "Mean cosine between outputs for different inputs (`inter`), from which the newborn model counts as having a "
        "direction; the page folds a section whose cosines are all below it.",
        "measured at d 128, 4 blocks, 1/√fan-in: tanh, SwiGLU and identity give at most .025; SiLU, GELU and ReLU at "
        "least .15",
    ),
    "preference": Threshold(
        0.05,
        "KL(p̄ ‖ uniform) in nats, from which the newborn model counts as preferring tokens.",
        "measured at d 128, 4 blocks, 1/√fan-in, 20 seeds: tanh, SwiGLU and identity give at most .023; SiLU, GELU and "
        "ReLU at least .089",
    ),
    "chance": Threshold(
        2.576,
        "Standard deviations by which alignment and rank persistence must exceed chance. Chance is a cosine of sd 1/√d "
        "for a random direction, and a ρ of sd 1/√(V−1) for a random order.",
        "two-sided 1 % of the normal distribution; definitions §3 and §4",
    ),
    "persists": Threshold(
        0.5,
        "Share of the value at birth from which the seed's mark counts as persistent; below it, as weaker.",
        "chosen",
    ),
    "trace": Threshold(
        0.1,
        "Share of the value at birth below which what is left counts as a trace.",
        "chosen; between the orders of p̄ of two seeds |ρ| was at most .093 in 190 pairs",
    ),
    "sink": Threshold(
        3.0,
        "Times the uniform share that the largest head of a block must give to position 0, beside exceeding ε of the "
        "sink rate, for a sink in that block.",
        "ε = .3 is published [AS]; the factor is chosen: on short sequences the uniform share alone is near ε",
    ),
    "no_sink": Threshold(
        2.0,
        "Times the uniform share below which a block has no sink, in its largest head; a stretch of blocks with a sink "
        "ends there. The page folds the sink if no head has more.",
        "chosen; the demo's largest head has 1.0 times",
    ),
    "no_sink_rate": Threshold(
        1.0,
        "Sink rate in per cent up to which the page folds the sink.",
        "chosen",
    ),
    "position": Threshold(
        0.5,
        "Share of the sink mass behind BOS that is left without BOS, from which the sink hangs on the position.",
        "chosen; SmolLM2 135M keeps 1.16 of it",
    ),
    "token": Threshold(
        0.2,
        "The same share up to which the sink hangs on the token BOS.",
        "chosen; Gemma 3 270M keeps .04 of it",
    ),
    "lineage": Threshold(
        _P,
        "log₁₀ p of the lineage test below which it finds the birth.",
        "published: p < .01 [SP]; definitions §10",
    ),
    "lineage_margin": Threshold(
        3.3,
        "By how much z must exceed the largest z of a stranger.",
        "one-sided 1 % of the difference of two values of sd 1",
    ),
    "variance": Threshold(
        2.0,
        "σ²(0)/σ²(late) from which the variance of position 0 stands out in a block; blocks from the first sink on are "
        "not judged.",
        "chosen; plain attention gives 1.6 to 126 by layer, head-wise RMSNorm 1.04 to 1.10",
    ),
    "writer": Threshold(
        0.1,
        "Share of what the strongest writer of the massive channel writes, from which another super neuron of it "
        "is named beside it; what one writes is taken as its activation times the sparsity of its down row.",
        "chosen: the two writers of SmolLM2-135M's block 12 are as 1 and .36, all others of the block below .001",
    ),
    "rank": Threshold(
        0.5,
        "Share of the embeddings' effective rank below which the states of a block fill few directions.",
        "chosen; SmolLM2-135M has .7 to .8 in blocks 1 to 11 and .08 in block 12, where its massive channel appears",
    ),
    "gradient": Threshold(
        3.0,
        "Times the gradient that the other positions get (times the start's largest, where that is more), from which "
        "the loss gradient gathers at the first position of a block.",
        "chosen; a newborn demo has at most 1.8 in a block on 16 × 64 tokens, SmolLM2-135M and Gemma 3 270M at most "
        "2.2 on 8 × 64 of text: early positions feed more later ones (definitions §16)",
    ),
    "dominance": Threshold(
        2.0,
        "Times the dominance ratio of the median position, from which position 0 has massive channels in a block.",
        "chosen; in the demo, which has no sink, the two agree within 1 %",
    ),
    "lock": Threshold(
        2.0,
        "Times 1/√d_head from which keys of position 0 count as locked onto the queries' direction in a block.",
        "chosen; 1/√d_head is the root mean square cosine of two random directions",
    ),
    "no_lock": Threshold(
        1.5,
        "The same factor, up to which in every block the page folds the lock.",
        "chosen: below `lock`, so that no block is near it",
    ),
    "alike": Threshold(
        1.25,
        "Ratio up to which (and from whose inverse) the page folds sections that compare position 0 with others: "
        "dominance and variance.",
        "chosen: below `dominance` and `variance`, so that no block is near them",
    ),
    "intervened_sink": Threshold(
        3.0,
        "Times the attention of uniform weights from which a key counts as a sink of an intervention, mean over blocks "
        "and heads of what later queries give to it.",
        "chosen: untouched keys of a trained model get at most uniform attention, a key that every block parks on ten "
        "times as much",
    ),
}
"""Thresholds by name."""


def threshold(name: str) -> float:
    """Return the value of a threshold."""
    return THRESHOLDS[name].value
