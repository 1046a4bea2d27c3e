"""Models that are worth comparing, and something to feed them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder


def _lively(config: ModelConfig, seed: int = 0) -> Decoder:
    """A newborn whose gains, biases and logits are random too: at 1 and 0 they would hide where they enter."""
    model = born(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def _random_tokens(config: ModelConfig, n: int = 3, length: int | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (n, length or config.max_seq_len), generator=generator)


@pytest.fixture
def lively():
    """``lively(config, seed=0)``: a newborn whose gains, biases and logits are random too."""
    return _lively


@pytest.fixture
def random_tokens():
    """``random_tokens(config, n=3, length=None, seed=0)``: int64 ``[n, length or max_seq_len]``."""
    return _random_tokens
