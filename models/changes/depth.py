"""Fewer blocks, or more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import UsageError
from ..config import ExpertsConfig, ModelConfig
from .change import Change, ModelWeights

_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class BlockDropping(Change):
    """Blocks are left out; those behind them move up (arXiv 2403.17887)."""

    blocks: list[int]
    """Numbers of the blocks to drop, from 0."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        if not self.blocks or len(set(self.blocks)) < len(self.blocks):
            return [f"blocks is {self.blocks}: give a list of different blocks"]
        return []

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        _check_blocks("drop_blocks: blocks", self.blocks, config.n_layers)
        if len(self.blocks) == config.n_layers:
            raise UsageError(f"drop_blocks: blocks is {self.blocks}: that is all of them, leave one")

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        return _in_order(model, [block for block in range(model.config.n_layers) if block not in self.blocks])


@dataclass(frozen=True)
class BlockCopying(Change):
    """A deeper model of copied blocks, as in depth up-scaling (SOLAR, arXiv 2312.15166)."""

    order: list[int]
    """The old block, from 0, of which each new one is a copy: ``[0, 1, 2, 1, 2, 3]`` makes six blocks of four."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return [] if 1 <= len(self.order) <= 2048 else [f"order has {len(self.order)} blocks: give 1 to 2048"]

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        _check_blocks("copy_blocks: order", self.order, config.n_layers)

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        return _in_order(model, self.order)


def _check_blocks(field: str, blocks: Sequence[int], n_layers: int) -> None:
    if away := [block for block in blocks if not 0 <= block < n_layers]:
        raise UsageError(f"{field} has {away[0]}: the model has blocks 0 to {n_layers - 1}")


def _in_order(model: ModelWeights, order: Sequence[int]) -> ModelWeights:
    """Build the model whose block i is the old block ``order[i]``."""
    config, attention = model.config, model.config.attention
    tensors = {name: tensor for name, tensor in model.tensors.items() if not _BLOCK.match(name)}
    for new, old in enumerate(order):
        prefix = f"blocks.{old}."
        tensors |= {
            f"blocks.{new}.{name.removeprefix(prefix)}": tensor
            for name, tensor in model.tensors.items()
            if name.startswith(prefix)
        }
    if attention.aggregation_blocks is not None:
        moved = [new for new, old in enumerate(order) if old in attention.aggregation_blocks]
        attention = replace(attention, aggregation_blocks=moved)
    if attention.nope_blocks is not None:
        moved = [new for new, old in enumerate(order) if old in attention.nope_blocks]
        attention = replace(attention, nope_blocks=moved)
    if isinstance(attention.window, list):
        windows = [attention.window[old] for old in order]
        attention = replace(attention, window=windows if any(windows) else None)
    return ModelWeights(
        replace(config, n_layers=len(order), attention=attention, experts=_experts(config.experts, order)), tensors
    )


def _experts(experts: ExpertsConfig, order: Sequence[int]) -> ExpertsConfig:
    """Return the experts' config for the new order of blocks: all blocks but the first ones have experts."""
    dense = [not experts.in_block(old) for old in order]
    n_dense = sum(dense)
    if not experts.is_on or n_dense == len(order):
        return ExpertsConfig()
    if any(dense[n_dense:]):
        raise UsageError(
            "blocks with a dense MLP would stand behind blocks with experts; keep model.experts.n_dense first"
        )
    return replace(experts, n_dense=n_dense or None)
