"""A model by any of its names of which one block at a time is in memory: ``--stream``."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import UsageError
from ...models.by_block.block_weights import BlockWeights
from ...models.by_block.decoder_by_block import DecoderByBlock, Streaming
from ...models.by_block.drawn_weights import DrawnWeights
from ...models.config import ModelConfig
from ..devices import device
from .loaded_model import UNKNOWN_STEP, LoadedModel
from .model_names import AnySource, ModelSource, SourceWithBirth, open_source


def open_by_block(name: str, dtype: torch.dtype, streaming: Streaming) -> LoadedModel:
    """A model by any of its names that our decoder can be (`open_source`).

    Args:
        name: the model.
        dtype: of the parameters.
        streaming: what its passes need beside it.

    Raises:
        UsageError: there is no such model, or our decoder cannot be it.
        RunError: a damaged file.
    """
    source = open_source(name)

    def by_block(weights: BlockWeights) -> DecoderByBlock:
        return DecoderByBlock(source.config, weights, dtype, device(), streaming)

    model = by_block(source.weights())
    if not isinstance(source, SourceWithBirth):
        return LoadedModel(name, model, None, UNKNOWN_STEP, source.tokenizer, stored_kinds=source.stored_kinds)
    return LoadedModel(
        name,
        model,
        lambda: by_block(source.born_weights(source.init_seed)),
        source.step,
        source.tokenizer,
        source.run,
        lambda n: by_block(source.born_weights(source.init_seed + n)),
    )


def source_by_block(source: AnySource, streaming: Streaming) -> ModelSource:
    """The same model; what it loads has one block at a time in memory.

    Raises:
        UsageError: our decoder cannot be it.
    """
    if not isinstance(source, ModelSource):
        raise UsageError(f"{source.name}: --stream reads models that our decoder can be, and this is none of them")

    def load() -> DecoderByBlock:
        return DecoderByBlock(source.config, source.weights(), device=device(), streaming=streaming)

    return replace(source, load=load)


def birth_by_block(config: ModelConfig, init_seed: int, streaming: Streaming) -> DecoderByBlock:
    """A birth of a config whose blocks are drawn one at a time."""
    return DecoderByBlock(config, DrawnWeights(config, init_seed), device=device(), streaming=streaming)
