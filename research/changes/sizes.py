"""Changes of a model's size: fewer and more blocks, fewer and more tokens; and two models averaged into one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import UsageError
from ...models.config import ExpertsConfig, InitConfig, ModelConfig
from ...models.init import keyed_generator
from .change import Change, ModelWeights, share_problem

_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class BlockDropping(Change):
    """Blocks are left out; those behind them move up (arXiv 2403.17887)."""

    blocks: list[int]
    """Numbers of the blocks to drop, from 0."""

    @override
    def problems(self) -> list[str]:
        if not self.blocks or len(set(self.blocks)) < len(self.blocks):
            return [f"blocks is {self.blocks}: give a list of different blocks"]
        return []

    @override
    def check(self, config: ModelConfig) -> None:
        _check_blocks("drop_blocks: blocks", self.blocks, config.n_layers)
        if len(self.blocks) == config.n_layers:
            raise UsageError(f"drop_blocks: blocks is {self.blocks}: that is all of them, leave one")

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        return _in_order(model, [block for block in range(model.config.n_layers) if block not in self.blocks])


@dataclass(frozen=True)
class BlockCopying(Change):
    """A deeper model of copied blocks, as in depth up-scaling (SOLAR, arXiv 2312.15166)."""

    order: list[int]
    """The old block, from 0, of which each new one is a copy: ``[0, 1, 2, 1, 2, 3]`` makes six blocks of four."""

    @override
    def problems(self) -> list[str]:
        return [] if 1 <= len(self.order) <= 2048 else [f"order has {len(self.order)} blocks: give 1 to 2048"]

    @override
    def check(self, config: ModelConfig) -> None:
        _check_blocks("copy_blocks: order", self.order, config.n_layers)

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
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


# ---------------------------------------------------------------- more tokens, or fewer

_TABLES = ("embed.weight", "head.weight")


@dataclass(frozen=True)
class VocabularyExtension(Change):
    """New tokens behind the old: each channel of their rows is drawn from a normal with that channel's mean and
    standard deviation over the old rows, in the embedding and in the head."""

    rows: int
    """Number of new rows."""

    @override
    def problems(self) -> list[str]:
        return [] if 1 <= self.rows <= 1 << 26 else [f"rows is {self.rows}: give 1 to {1 << 26}"]

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        tensors = dict(model.tensors)
        for name in _TABLES:
            if name in tensors:
                tensors[name] = torch.cat([tensors[name], self._new_rows(tensors[name], name, seed)])
        return ModelWeights(replace(model.config, vocab_size=model.config.vocab_size + self.rows), tensors)

    def _new_rows(self, table_VD: Tensor, name: str, seed: int) -> Tensor:
        normals_RD = keyed_generator(seed, "new rows", name).standard_normal(
            (self.rows, table_VD.shape[1]), dtype="float32"
        )
        return table_VD.mean(0) + table_VD.std(0, correction=0) * torch.from_numpy(normals_RD).to(table_VD)


def first_tokens(model: ModelWeights, n_tokens: int) -> ModelWeights:
    """Remove the tokens from ``n_tokens`` on; hidden states on the others stay the same.

    Raises:
        UsageError: the model has fewer tokens.
    """
    if not 2 <= n_tokens <= model.config.vocab_size:
        raise UsageError(f"{n_tokens} tokens of a model that has {model.config.vocab_size}: give 2 to that number")
    tensors = {name: t[:n_tokens] if name in _TABLES else t for name, t in model.tensors.items()}
    return ModelWeights(replace(model.config, vocab_size=n_tokens), tensors)


# ---------------------------------------------------------------- two models averaged into one


@dataclass(frozen=True)
class Merging(Change):
    """``(1 − share)·a + share·b`` of every tensor (model soups, arXiv 2203.05482)."""

    share: float
    """Share of the other model."""

    needs_other: ClassVar[bool] = True

    @override
    def problems(self) -> list[str]:
        return share_problem("share", self.share)

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        if other is None:
            raise UsageError("merge: needs another model to merge with")
        if _function(model.config) != _function(other.config):
            raise UsageError("merge: the two models have different configs, so that their weights cannot be averaged")
        return model._replace(tensors=_averaged(model.tensors, other.tensors, self.share))


def _function(config: ModelConfig) -> ModelConfig:
    """Return the config with default initialisation, which leaves the fields that decide the function."""
    return replace(config, init=InitConfig())


def _averaged(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    return {name: tensor.lerp(others[name].to(tensor), share) for name, tensor in tensors.items()}
