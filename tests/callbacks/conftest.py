"""What the tests of snapshots share: a small model of transformers, and what it is trained on."""

import pytest
import torch

from birthmark.callbacks.config import SnapshotConfig


@pytest.fixture(scope="session")
def small_probe():
    """A probe that a tiny model reads in no time, and that batches do not share evenly."""
    return SnapshotConfig(n_sequences=10, seq_len=8, batch_size=4, top_k=5)


@pytest.fixture
def llama(their_config):
    """``llama(seed=0)``: a newborn causal LM with dropout, so that modes and random numbers matter in training."""
    import transformers

    def build(seed=0):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return transformers.LlamaForCausalLM(their_config("llama", attention_dropout=0.1))

    return build


@pytest.fixture(scope="session")
def token_batches():
    """Five batches ``[4, 12]`` of token ids."""
    return torch.randint(0, 61, (5, 4, 12), generator=torch.Generator().manual_seed(7))
