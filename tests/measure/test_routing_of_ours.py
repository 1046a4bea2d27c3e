"""What a snapshot finds of our own experts, against what their routers say."""

import numpy as np
import pytest
import torch

from birthmark.data.probes import random_probe
from birthmark.measure.measurement import measure
from birthmark.metrics.experts import ExpertUnits
from birthmark.metrics.quantity import Sizes
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
    shares_TE = np.stack([np.bincount(of_t.ravel(), minlength=4) / of_t.size for of_t in chosen_NTK.swapaxes(0, 1)])
    others_E = shares_TE[1:].mean(0)
    distance_T = np.abs(shares_TE - others_E).sum(-1) / 2
    for name, expected in {
        "expert_share_first": shares_TE[0], "expert_share_others": others_E, "routing_distance": distance_T,
        "routing_first": distance_T[0], "routing_median": np.median(distance_T[1:]),
    }.items():  # fmt: skip
        np.testing.assert_allclose(found.arrays[name][1], expected, err_msg=name)
        assert np.isnan(found.arrays[name][0]).all()  # a dense block has none


def test_units_of_experts_are_counted_over_the_tokens_that_each_is_sent():
    """By hooks on the router and on each expert's maps, which are called as modules then."""
    experts = ExpertsConfig(n_experts=4, top_k=2, d_ff=40, d_shared=8)
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=6, experts=experts, mlp="relu")
    model = born(config, 0)
    with torch.no_grad():
        # Position 0, whatever its token, is sent to expert 1 and its unit 7 is loud; two units of another are dead.
        model.embed.weight[3] = 5.0
        mixture = model.blocks[1].mlp
        mixture.router.weight[1] = 0.5
        mixture.experts[1].up.weight[7] = 3.0
        mixture.experts[2].up.weight[[4, 9]] = 0.0
    probe = PROBE.copy()
    probe[:, 0], probe[:, 1:] = 3, np.where(probe[:, 1:] == 3, 4, probe[:, 1:])
    inputs, logits = [], []
    handles = [
        mixture.register_forward_pre_hook(lambda module, args: inputs.append(args[0].double())),
        mixture.router.register_forward_hook(lambda module, args, output: logits.append(output)),
    ]
    found = measure(model, probe, batch_size=5).arrays
    for handle in handles:
        handle.remove()
    x_NTD, chosen_NTK = torch.cat(inputs), torch.cat(logits).topk(2, dim=-1).indices
    position_NT = torch.arange(6).expand(12, 6)
    for e, expert in enumerate(mixture.experts):
        sent_NT = (chosen_NTK == e).any(-1)
        a_RF = (x_NTD[sent_NT] @ expert.up.weight.detach().double().T).relu()
        position_R = position_NT[sent_NT]
        of_kind = (a_RF[position_R == 0], a_RF[position_R > 0])
        first_F, others_F = (a.mean(0).numpy() if len(a) else np.zeros(40) for a in of_kind)
        deviation = first_F - np.median(first_F)
        with np.errstate(divide="ignore", invalid="ignore"):
            z, ratio = deviation / (1.4826 * np.median(abs(deviation))), first_F / others_F
        assert found["expert_super_neurons"][1, e] == ((z >= 10) & (ratio >= 5)).sum()
        assert found["expert_dead_units"][1, e] == (a_RF == 0).all(0).sum() if sent_NT.any() else True
    assert found["expert_super_neurons"][1, 1] >= 1
    assert found["expert_dead_units"][1, 2] >= 2


def test_an_expert_that_receives_one_first_token_has_its_activations_as_means():
    """Unit 3 is six times as loud there as elsewhere, which half of it would not show."""
    metric = ExpertUnits(Sizes(1, 1, 8, 8, 20, 40, 6, n_experts=2, d_expert=20))
    a_RF = 1 + 0.1 * torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    a_RF[0, 3], a_RF[1:, 3], a_RF[:, 8] = -60, 10, 0
    metric.update(0, 1, a_RF, torch.tensor([0, 1, 2, 3, 1]))
    found = metric.compute()
    np.testing.assert_array_equal(found["expert_super_neurons"], [[np.nan, 1]])
    np.testing.assert_array_equal(found["expert_dead_units"], [[np.nan, 1]])


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
