"""Models by any of their names with one block at a time in memory: ``--stream``."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import UsageError
from ...models.by_block import BlockWeights, DecoderByBlock, DrawnWeights, Streaming
from ...models.config import ModelConfig
from ..devices import device
from .loaded_model import UNKNOWN_STEP, LoadedModel
from .model_names import AnySource, ModelSource, SourceWithBirth, open_source


def open_by_block(name: str, dtype: torch.dtype, streaming: Streaming) -> LoadedModel:
    """Open a model by any of its names, if it fits the decoder (`open_source`).

    Args:
        name: the model.
        dtype: type of the parameters.
        streaming: scratch space and progress callback of its passes.

    Raises:
        UsageError: there is no such model, or it does not fit the decoder.
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
    """Return the same source, with a model that has one block at a time in memory.

    Raises:
        UsageError: the model does not fit the decoder.
    """
    if not isinstance(source, ModelSource):
        raise UsageError(f"{source.name}: --stream reads models that our decoder can be, and this is none of them")

    def load() -> DecoderByBlock:
        return DecoderByBlock(source.config, source.weights(), device=device(), streaming=streaming)

    return replace(source, load=load)


def birth_by_block(config: ModelConfig, init_seed: int, streaming: Streaming) -> DecoderByBlock:
    """Return a birth of a config whose blocks are drawn one at a time."""
    return DecoderByBlock(config, DrawnWeights(config, init_seed), device=device(), streaming=streaming)
