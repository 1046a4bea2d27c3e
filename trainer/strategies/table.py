"""Distribution strategies: one row each, with all facts that other code may ask for.

Light on purpose: configs and the command line read it before torch is loaded. The set-up of each strategy is in
``lightning_setup.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...models.config import ModelConfig

StrategyName = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class StrategyFacts:
    """Features of a strategy, and the fields that it reads and refuses."""

    launched: bool = True
    """True if a launcher starts its processes."""
    shards_weights: bool = False
    """True if each process holds a part of the weights, so that passes gather them."""
    zero_stage: int | None = None
    """Stage of DeepSpeed's ZeRO; None where torch steps the optimizer."""
    reads: frozenset[str] = frozenset()
    """Fields of ``trainer`` that only some strategies read, of which this is one."""
    refuses: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    """(field of ``trainer``, value) that the strategy does not support → the reason, and the remedy; ``{strategy}``
    stands for its name.
    """

    @property
    def engine(self) -> bool:
        """True if DeepSpeed's engine steps the optimizer, clips and knows the gradient's norm."""
        return self.zero_stage is not None

    @property
    def shards_optimizer(self) -> bool:
        """True if each process holds a part of the optimizer's state."""
        return self.engine or self.shards_weights


_WHOLE_STEP = {("compile", "step"): "but {strategy} gathers weights inside the step: give blocks or no"}
_COMPILE = {
    ("compile", what): "but {strategy} gathers the weights of every module in hooks that no graph can hold: give no"
    for what in ("step", "blocks")
}
_NVME = {("offload", "nvme"): "which {strategy} cannot: give cpu, or trainer.strategy zero3"}
_SELECTIVE = {
    ("activation_checkpointing", "selective"): "but {strategy} gathers weights inside the blocks, whose operators it "
    "would have to keep: give full or none"
}

_FP8 = {("precision", "fp8"): "but {strategy} gathers and multiplies weights in hooks of its own: give bf16"}

#: Strategies by ``trainer.strategy``.
STRATEGIES: dict[StrategyName, StrategyFacts] = {
    "single": StrategyFacts(launched=False),
    "ddp": StrategyFacts(reads=frozenset({"context_parallel"})),
    "fsdp2": StrategyFacts(
        shards_weights=True,
        reads=frozenset({"replicas", "gather", "reduce", "accumulate", "context_parallel"}),
        refuses=_WHOLE_STEP,
    ),
    "zero1": StrategyFacts(zero_stage=1, reads=frozenset({"offload", "context_parallel"}), refuses=_NVME),
    "zero2": StrategyFacts(zero_stage=2, reads=frozenset({"offload", "context_parallel"}), refuses=_NVME),
    "zero3": StrategyFacts(
        shards_weights=True,
        zero_stage=3,
        reads=frozenset({"gather", "offload", "offload_dir"}),
        refuses=_COMPILE | _SELECTIVE | _FP8,
    ),
}

#: Fields of ``trainer`` that only some strategies read, and the value that they have where they are not set.
STRATEGY_FIELDS: dict[str, Any] = {
    "replicas": 1,
    "gather": "auto",
    "reduce": "fp32",
    "accumulate": "whole",
    "context_parallel": 1,
    "offload": "none",
    "offload_dir": "",
}


def _says_nothing(name: str, values: Mapping[str, Any]) -> bool:
    """Return True if a strategy that ignores this field acts as the field says anyway.

    A strategy that gathers nothing uses weights in the run's precision, or unchanged.
    """
    as_it_is = (STRATEGY_FIELDS[name], "fp32", values["precision"]) if name == "gather" else (STRATEGY_FIELDS[name],)
    return values[name] in as_it_is


def strategy_problems(strategy: StrategyName, values: Mapping[str, Any]) -> list[str]:
    """List values of ``trainer``'s fields that a strategy does not read or support, one line each."""
    facts = STRATEGIES[strategy]
    found = [
        f"trainer.{name} is {values[name]}, which strategy {strategy} does not read: remove it"
        for name in STRATEGY_FIELDS
        if name not in facts.reads and not _says_nothing(name, values)
    ]
    found += [
        f"trainer.{name} is {value}, {why.format(strategy=strategy)}"
        for (name, value), why in facts.refuses.items()
        if values[name] == value
    ]
    return found


#: torch compiles a block that is computed again as a whole, or, without a word, not at all.
_TWO_GRAPHS = "blocks, which trainer.activation_checkpointing {} makes one graph each: give one of them up"


def context_problems(size: int, compiled: str, checkpointing: str, model: ModelConfig) -> list[str]:
    """List parts of a model and of a run that sequences divided among ``size`` processes exclude, one line each."""
    if size <= 1:
        return []
    found, attention = [], model.attention
    if model.max_seq_len % (2 * size):
        found.append(
            f"trainer.context_parallel is {size}, but model.max_seq_len {model.max_seq_len} is no multiple of "
            f"{2 * size}: each process takes two equal chunks of every sequence"
        )
    if (attention.prefix or 0) > (chunk := model.max_seq_len // (2 * size)):
        found.append(
            f"trainer.context_parallel is {size}, but the positions of model.attention.prefix {attention.prefix} see "
            f"later ones, and those beyond the first chunk of {chunk} would not: give a prefix of {chunk} at most"
        )
    found += [
        f"trainer.context_parallel is {size}, but model.attention.{part} {name} is a class of your own, which may look "
        "at a whole sequence: leave one of them out"
        for part, name in attention.user_parts.items()
    ]
    if compiled == "step" or (compiled == "blocks" and checkpointing != "none"):
        found.append(
            f"trainer.compile is {compiled}, but trainer.context_parallel {size} has attention exchange keys inside "
            + ("what would be one graph: give blocks" if compiled == "step" else _TWO_GRAPHS.format(checkpointing))
        )
    return found
