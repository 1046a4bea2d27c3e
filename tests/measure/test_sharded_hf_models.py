"""A model of ``transformers`` that DeepSpeed's ZeRO 3 shards while it trains it: measured as one that is whole, and
trained as without a measurement."""

import importlib.util
import json

import pytest

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import deepspeed
import numpy as np
import torch
import transformers
from birthmark.data.probes import random_probe
from birthmark.measure.find_model import measurable, unwrap
from birthmark.measure.measurement import birth_reference, measure
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.strategies.zero import prepare_deepspeed

transformers.logging.set_verbosity_error()
SHAPE = dict(
    vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=24, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
)
ENGINE = {
    "train_micro_batch_size_per_gpu": 2,
    # No parameter is small enough to stay whole.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
# As many sequences as two ranks cannot share evenly.
probe = random_probe(61, 5, 8, 0)

def made():
    torch.manual_seed(5)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE))

def trained(rank, births):
    model = made()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ENGINE)[0]
    found, losses = [], []
    for step in range(2):
        if births is not None:
            found.append(measure(measurable(unwrap(engine)), probe, births, batch_size=3))
        tokens = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return found, losses, [p.ds_tensor.clone() for p in engine.module.parameters()]

where = launched_process()
with join_process_group(where, torch.device("cpu")):
    prepare_deepspeed(torch.device("cpu"))
    whole = measurable(made())
    births = birth_reference(whole, probe, 9)
    expected = measure(whole, probe, births, batch_size=9)
    (first, last), losses, weights = trained(where.rank, births)
    for found, wanted in ((first.arrays, expected.arrays), (first.scalars, expected.scalars)):
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    _, plain_losses, plain_weights = trained(where.rank, None)
    if where.rank == 0:
        moved = abs(last.arrays["mean_prob"] - first.arrays["mean_prob"]).max()
        same = losses == plain_losses and all(map(torch.equal, weights, plain_weights))
        print(json.dumps({"names": len(expected.arrays), "moved": moved, "same": same}))
"""


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_weights_that_zero_3_shards_are_gathered_and_training_goes_on_as_without(forked, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    found = json.loads(forked(tmp_path / "script.py").splitlines()[-1])
    assert found["names"] > 60
    assert found["moved"] > 1e-4
    assert found["same"]
