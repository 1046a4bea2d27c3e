"""A real, trained model from its GGUF file, measured, against eager transformers in float32."""

import functools

import gguf
import pytest
import torch
import transformers

from birthmark.data.probes import random_probe
from birthmark.measure.config import SnapshotConfig
from birthmark.trainer.by_name.loaded_model import load_named, measure_loaded


@torch.no_grad()
@pytest.mark.heavy
def test_a_snapshot_of_smollm2_is_that_of_eager_transformers(smollm2, monkeypatch):
    loaded = load_named(str(smollm2))
    found = measure_loaded(loaded, SnapshotConfig(n_sequences=4, seq_len=33, batch_size=2))
    tokens_BT = torch.from_numpy(random_probe(loaded.model.config.vocab_size, 4, 33, 0))
    # The library dequantises by itself. It makes this table for every module.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    eager = transformers.LlamaForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    )
    passed = eager(tokens_BT, output_attentions=True)
    mean_prob_V = passed.logits[:, -1].softmax(-1).double().mean(0)
    torch.testing.assert_close(torch.from_numpy(found.arrays["mean_prob"]).double(), mean_prob_V, atol=1e-6, rtol=1e-3)
    for layer, weights_BHTT in enumerate(passed.attentions):
        mass_H = weights_BHTT[:, :, 1:, 0].double().mean((0, 2))
        torch.testing.assert_close(
            torch.from_numpy(found.arrays["sink_mass"][layer]).double(), mass_H, atol=1e-6, rtol=0
        )
    # Heads of the later blocks park on the first key.
    assert found.arrays["sink_mass"].max() > 0.9
    assert found.summary["stored_kinds"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
