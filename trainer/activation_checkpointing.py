"""Treatment of the decoder's blocks in training: activation checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..models.attention.kv_cache import LayerCache
from ..models.attention.positions import Placement
from ..models.decoder import Block, Decoder
from ..models.experts.routing_losses import BlockRouting, RoutingLosses
from ..models.observe import Observer
from .config import TrainerConfig

#: The training pass of a block: (block, ``[B, T, D]``, positions, the positions that count, and their number) →
#: ``[B, T, D]``, with its router's choices and costs.
TrainPass = Callable[[Block, Tensor, Placement, Tensor | None, Tensor | None], tuple[Tensor, list[BlockRouting]]]

#: Operators whose results ``selective`` keeps, by name: matrix products with weights, and fused attention. All else is
#: cheap to compute again, or as large as an attention matrix.
_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "birthmark::causal_blocks",
    "birthmark::causal_native",
    "birthmark::causal_walk",
    "birthmark::experts",
)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(around: TrainPass, **options: Any) -> TrainPass:
    # Nothing in a block is random, so that there is no random state to put back.
    return lambda *args: checkpoint(around, *args, use_reentrant=False, preserve_rng_state=False, **options)


#: Kinds of activation checkpointing by name.
CHECKPOINTING: dict[str, Callable[[TrainPass], TrainPass]] = {
    "none": lambda around: around,
    "selective": lambda around: _checkpointed(
        around, context_fn=partial(create_selective_checkpoint_contexts, _policy)
    ),
    "full": _checkpointed,
}


def _block_pass(
    block: Block, x_BTD: Tensor, place: Placement, counts_BT: Tensor | None, n_counted: Tensor | None
) -> tuple[Tensor, list[BlockRouting]]:
    # A new collector for each pass, so that recomputation in the backward pass is not counted again.
    losses = RoutingLosses(counts_BT, n_counted)
    return Block.forward(block, x_BTD, place, losses=losses), losses.by_block


def _wrapped(
    block: Block,
    train_pass: TrainPass,
    x_BTD: Tensor,
    place: Placement,
    observer: Observer | None = None,
    cache: LayerCache | None = None,
    losses: RoutingLosses | None = None,
) -> Tensor:
    """Run the wrapped pass in training; the block's own pass in evaluation, or with an observer or a cache."""
    if block.training and observer is None and cache is None:
        counted = (None, None) if losses is None else (losses.counts_BT, losses.n_counted)
        x_BTD, by_block = train_pass(block, x_BTD, place, *counted)
        if losses is not None:
            losses.by_block += by_block
        return x_BTD
    return Block.forward(block, x_BTD, place, observer, cache, losses)


def set_train_passes(model: Decoder, config: TrainerConfig) -> None:
    """Checkpoint and compile each block's training pass; the pass for measurements stays unchanged."""
    if config.activation_checkpointing == "none" and config.compile != "blocks":
        return
    train_pass = CHECKPOINTING[config.activation_checkpointing](_block_pass)
    if config.compile == "blocks":
        # One function for all blocks, so that they share one graph.
        train_pass = torch.compile(train_pass)
    for block in model.blocks:
        assert isinstance(block, Block)
        # On the instance: FSDP2 exchanges the class.
        block.forward = partial(_wrapped, block, train_pass)  # type: ignore[method-assign]
