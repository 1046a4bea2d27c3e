"""What a snapshot finds of our own experts, against what their routers say."""

import numpy as np
import pytest
import torch

from birthmark.data.probes import random_probe
from birthmark.measure.measurement import measure
from birthmark.models.birth import born
from birthmark.models.config import ExpertsConfig, ModelConfig

PROBE = random_probe(40, 12, 6, 0)


def routed(n_dense):
    experts = ExpertsConfig(n_experts=4, top_k=2, d_ff=8, n_dense=n_dense)
    return born(ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=6, experts=experts), 0)


@pytest.fixture(scope="module")
def half():
    """A model with a dense block and one of experts."""
    return routed(1)


def test_shares_by_position_are_those_of_the_routers_choices(half):
    logits = []
    handle = half.blocks[1].mlp.router.register_forward_hook(lambda module, inputs, output: logits.append(output))
    found = measure(half, PROBE, batch_size=5)
    handle.remove()
    chosen_NTK = torch.cat(logits).argsort(-1, descending=True)[..., :2].numpy()
    for name, positions in (("first", chosen_NTK[:, :1]), ("others", chosen_NTK[:, 1:])):
        shares = np.bincount(positions.ravel(), minlength=4) / positions.size
        np.testing.assert_allclose(found.arrays[f"expert_share_{name}"][1], shares)
        assert np.isnan(found.arrays[f"expert_share_{name}"][0]).all()  # a dense block has none


def test_hidden_units_are_seen_in_dense_blocks_and_named_in_the_others(half):
    found = measure(half, PROBE)
    assert found.unseen == ("the hidden units of block 2 (a mixture of experts)",)
    activation_LF = found.arrays["activation_first"]
    assert np.isfinite(activation_LF[0]).all()
    assert np.isnan(activation_LF[1]).all()
    everywhere = measure(routed(None), PROBE)
    assert everywhere.unseen == ("the hidden units of blocks 1–2 (a mixture of experts)",)
    assert "activation_first" not in everywhere.arrays
    assert everywhere.arrays["expert_share_first"].shape == (2, 4)
