"""The next tokens of a probe: which of them a model predicts, and the passes in which it does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from .foreign import ForeignModel
from .foreign.foreign_model import ForeignConfig
from .observed import device_of
from .whole_pass import documents_apart


def first_prediction(config: ModelConfig | ForeignConfig, n_tokens: int) -> int:
    """The first position whose next token counts in a loss, of sequences of ``n_tokens``.

    Raises:
        UsageError: there is none: all of them are of a prefix that sees itself.
    """
    first = config.attention.first_prediction
    if first > n_tokens - 2:
        raise UsageError(
            f"sequences of {n_tokens} tokens: of a prefix of {first + 1} (model.attention.prefix) none is predicted; "
            f"give a seq_len of {first + 2} or more"
        )
    return first


def passes(
    model: Decoder | ForeignModel, tokens_NT: np.ndarray, documents_NT: np.ndarray | None, batch_size: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The batches of a probe ``[B, T]`` on the model's device, each with what its pass takes beside the tokens: the
    numbers of their documents, where the model sees each document alone."""
    device, apart = device_of(model), documents_apart(model)
    for start in range(0, len(tokens_NT), batch_size):
        part = slice(start, start + batch_size)
        more: dict[str, Tensor] = {}
        if apart and documents_NT is not None:
            more["documents_BT"] = torch.from_numpy(np.ascontiguousarray(documents_NT[part])).to(device)
        yield torch.from_numpy(np.ascontiguousarray(tokens_NT[part])).to(device), more
