"""Changes of weights that leave the logits the same, and their refusal where an architecture does not allow them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birthmark.errors import UsageError
from birthmark.measure.matched.channel_changes import CHANGES, changed
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "max_seq_len": 8}
MODELS = {
    "llama": {"mlp": "swiglu"},
    "layernorm": {"norm": "layernorm"},
    "gpt2": {"norm": "layernorm", "bias": True, "positions": "learned", "tie_embeddings": True},
    "gemma2": {"norm_placement": "both", "mlp": "geglu"},
}
REFUSED = {
    "layernorm": {"signs"},
    "gpt2": {"signs", "scale", "rotation"},
    "gemma2": {"scale", "rotation"},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_and_weights_do_not(name):
    model = born(ModelConfig(**SMALL, **MODELS[name]), 3, "cpu")
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():  # gains and biases as after training
            parameter.add_(torch.from_numpy(0.1 * rng.standard_normal(parameter.shape)).float())
    tokens = torch.arange(8)[None] * 7 % 64
    logits = model(tokens)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for change in CHANGES:
        if change in REFUSED.get(name, ()):
            with pytest.raises(UsageError, match=r"would change what this model computes|need norms that stand"):
                changed(model, change)
            continue
        other = changed(model, change)
        torch.testing.assert_close(other(tokens), logits, atol=2e-5, rtol=2e-5)
        assert any(not torch.allclose(p, before[name]) for name, p in other.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
