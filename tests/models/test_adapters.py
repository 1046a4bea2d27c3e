"""Adapters on a decoder: what they add, by slow formulas in float64; what they leave alone."""

from dataclasses import replace

import pytest
import torch
from oracles import Seen, in_pieces

from birthmark.measure.gradients import measure_gradients
from birthmark.measure.measurement import measure
from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.adapters import attach, initialize_adapter, is_adapter
from birthmark.models.birth import born, digest
from birthmark.models.config import AttentionConfig, CalibrationConfig, DropoutConfig, ExpertsConfig, ModelConfig
from birthmark.models.dropout import Dropout, keys_of_samples
from birthmark.trainer.module import next_token_loss

SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 32, "max_seq_len": 9}
CONFIG = ModelConfig(**SIZES, mlp="swiglu")
ARMS = {
    "plain": {},
    "window, sink, headnorm": {"window": 4, "normaliser": "softmax_sink", "aggregation": "headnorm"},
    "off by one, exact n_eff": {"normaliser": "softmax_off_by_one", "aggregation": "calibrated"},
    "sigmoid, gate": {"normaliser": "sigmoid", "gate": "head"},
    "normalised elu, key and value": {"normaliser": "elu", "normalise_rows": True, "kv_bias": "key_value"},
    "softpick": {"normaliser": "softpick"},
    "clipped": {"normaliser": "softmax_clipped", "clip_alpha": 2.0, "clip_zeta": 1.1},
    "estimated ρ": {"aggregation": "calibrated", "calibration": CalibrationConfig(correlation="estimated")},
}
LORA = AdapterConfig(kind="lora", rank=3, alpha=6.0, maps=["attn.q", "attn.v", "attn.o", "mlp.gate", "mlp.down"])
KINDS = {"lora": LORA, "prefix": AdapterConfig("prefix", length=3), "prefix_plus": AdapterConfig("prefix_plus")}


def adapted(kind, arm="plain", moved=True, seed=0):
    """A newborn in float64 with an adapter; ``moved``: as if it had been trained."""
    config = replace(CONFIG, attention=AttentionConfig(**ARMS[arm]))
    model = born(config, seed).double()
    attach(model, KINDS[kind])
    initialize_adapter(model, config.init, seed)
    if moved:
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data += 0.5 * noise
    return model


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_lora_and_prefix_plus_begin_as_the_model_itself_bit_for_bit_and_only_they_are_trained(arm, tokens):
    plain = born(replace(CONFIG, attention=AttentionConfig(**ARMS[arm])), 0).double()
    before = plain.eval()(tokens)
    for kind in ("lora", "prefix_plus"):
        model = adapted(kind, arm, moved=False)
        assert torch.equal(model(tokens), before)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == {
            name for name, _ in model.named_parameters() if is_adapter(name)
        }
        moving = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.train()(tokens)
        assert all(torch.equal(buffer, moving[name]) for name, buffer in model.named_buffers())
    # A prefix is 0 in what it writes, and takes its weight from the tokens, where they share one row of weights.
    unchanged = torch.equal(adapted("prefix", arm, moved=False)(tokens), before)
    assert unchanged == arm.startswith("sigmoid")


@torch.no_grad()
def test_lora_is_the_model_with_the_product_added_to_its_weights(tokens):
    model, plain = adapted("lora"), born(CONFIG, 0).double()
    state, mine = plain.state_dict(), dict(model.named_parameters())
    for block in range(2):
        for name in LORA.maps:
            full = f"blocks.{block}.{name}"
            state[f"{full}.weight"] += 2.0 * mine[f"{full}.adapter.up.weight"] @ mine[f"{full}.adapter.down.weight"]
    torch.testing.assert_close(model(tokens), plain(tokens), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_prefix_plus_adds_features_of_queries_times_a_matrix_to_what_heads_give(arm, tokens):
    model, seen, base = adapted("prefix_plus", arm), Seen(), Seen()
    model(tokens, observer=seen)
    matrix = model.blocks[0].attn.adapter_output.matrix.view(4, 4, 4)
    model.blocks[0].attn.adapter_output = None
    model(tokens, observer=base)
    q = seen.attended[1].q_BHTK
    phi = torch.where(q > 0, q, q.exp() - 1)
    expected = base.attended[1].out_BHTK.clone()
    for head in range(4):
        for t in range(9):
            for b in range(3):
                expected[b, head, t] += phi[b, head, t] @ matrix[head]
    torch.testing.assert_close(seen.attended[1].out_BHTK, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("arm", [name for name in ARMS if "elu" not in name and "ρ" not in name])
@torch.no_grad()
def test_a_prefix_is_keys_and_values_beside_those_of_the_tokens(arm, tokens):
    model, seen = adapted("prefix", arm), Seen()
    model(tokens, observer=seen)
    for block, found in zip(model.blocks, seen.attended.values(), strict=True):
        attn = block.attn
        own_k, own_v = (x.repeat_interleave(2, 0) for x in (attn.adapter_keys.key, attn.adapter_keys.value))
        for b, h, t in ((0, 0, 0), (1, 3, 5), (2, 2, 8)):
            first = max(0, t - 3) if attn.window else 0
            keys = torch.cat([own_k[h], found.k_BHTK[b, h, first : t + 1]])
            values = torch.cat([own_v[h], found.v_BHTK[b, h, first : t + 1]])
            scores = keys @ found.q_BHTK[b, h, t] / 2.0
            if arm.startswith("sigmoid"):
                weights = scores.sigmoid()
            elif arm == "softpick":
                excess = scores.exp() - 1
                weights = excess.relu() / (excess.abs().sum() + 1e-8 * scores.max().clip(0).exp())
            elif arm == "clipped":
                weights = ((1.1 + 2 / 9) * scores.softmax(-1) - 2 / 9).clip(0, 1)
            else:
                more = {"plain": 0.0, "off by one, exact n_eff": 1.0}.get(arm)
                more = attn.normaliser.logit[h].exp() if more is None else more
                weights = scores.exp() / (scores.exp().sum() + more)
            torch.testing.assert_close(found.o_BHTK[b, h, t], weights @ values, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(found.weights.prefix_share()[b, h, t], weights[:3].sum(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_adapter_alone_and_a_cache_changes_nothing(kind, tokens):
    model = adapted(kind)
    whole = model(tokens)
    whole.square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()} == {
        name for name, _ in model.named_parameters() if is_adapter(name)
    }
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(model, tokens, [4, 3, 1, 1]), whole.detach(), atol=1e-10, rtol=1e-10)


def test_the_start_depends_on_seed_and_name_alone_and_the_base_is_a_plain_birth():
    one, again, other = (adapted("lora", moved=False, seed=seed) for seed in (0, 0, 1))
    assert digest(one) == digest(again) != digest(other)
    drawn = [p.flatten() * p.shape[1] ** 0.5 for name, p in one.named_parameters() if "adapter.down.weight" in name]
    assert torch.cat(drawn).std().item() == pytest.approx(1, abs=0.1)
    plain = dict(born(CONFIG, 0).named_parameters())
    assert all(torch.equal(p.float(), plain[name]) for name, p in one.named_parameters() if not is_adapter(name))


def test_a_snapshot_tells_weight_on_the_prefix_from_that_on_position_0(tokens):
    probe = tokens.numpy()
    model, seen = adapted("prefix"), Seen()
    found = measure(model, probe, batch_size=2)
    with torch.no_grad():
        model(tokens, observer=seen)
    for layer, attended in enumerate(seen.attended.values()):
        rows = attended.weights.rows(0, 9)
        on_first = rows[:, :, 1:, 0].mean((0, 2))
        torch.testing.assert_close(torch.tensor(found.arrays["sink_mass"][layer]), on_first, atol=1e-6, rtol=1e-5)
        # What the tokens do not have, the prefix has.
        left = 1 - rows[:, :, 1:].sum(-1).mean((0, 2))
        torch.testing.assert_close(torch.tensor(found.arrays["prefix_mass"][layer]), left, atol=1e-6, rtol=1e-5)
    assert found.scalars["prefix_mass"] == pytest.approx(found.arrays["prefix_mass"].mean())
    assert "sink_mass_normalised" in found.scalars
    without = measure(adapted("prefix_plus"), probe)
    assert not {"prefix_mass", "sink_mass_normalised"} & {*without.scalars, *without.arrays}
    assert abs(without.arrays["positional_variance_out"] - without.arrays["positional_variance"]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_snapshot_is_that_of_the_adapted_model(kind, tokens):
    model = adapted(kind)
    found = measure_gradients(model, tokens.numpy(), batch_size=2)
    with torch.no_grad():
        model(tokens[:, :-1], observer=(seen := Seen()))
    h = block_input = seen.residuals["embedding", 0].requires_grad_()
    place = model.positions.place(8, tokens.device)
    for block in model.blocks:
        h = block(h, place)
    logits_BVT = model.leave(h).transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits_BVT, tokens[:, 1:], reduction="none")
    (gradient,) = torch.autograd.grad(losses.mean(1).sum(), block_input)
    norms = torch.tensor(found.arrays["gradient_mlp"][0, :8])
    torch.testing.assert_close(norms, gradient.norm(dim=-1).mean(0), atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (AdapterConfig("lora", length=3), "adapter.length is set, but only adapter.kind prefix reads it"),
        (AdapterConfig(rank=3), "adapter.rank is set, but only adapter.kind lora reads it"),
        (AdapterConfig("prefix", feature_map="elu"), "only adapter.kind prefix_plus reads it"),
        (AdapterConfig("lora", rank=0), "adapter.rank is 0: give at least 1"),
        (AdapterConfig("lora", alpha=-1.0), "adapter.alpha is -1.0: give a positive number"),
        (AdapterConfig("lora", maps=[]), "adapter.maps is empty"),
        (AdapterConfig("lora", maps=["attn.q", "attn.q"]), "names attn.q twice"),
    ],
)
def test_a_field_that_nothing_reads_or_out_of_range_is_one_line(adapter, expected):
    (problem,) = adapter.problems()
    assert expected in problem
    assert "\n" not in problem


def test_what_does_not_fit_a_model_is_one_line():
    assert LORA.misfits(CONFIG) == []
    (problem,) = AdapterConfig("lora", rank=8).misfits(CONFIG)
    assert "adapter.rank is 8, and attn.v has a side of 8: give less than 8" in problem
    (problem,) = LORA.misfits(replace(CONFIG, mlp="gelu"))
    assert "adapter.maps names mlp.gate, but model.mlp gelu has none" in problem


EXPERTS = ExpertsConfig(n_experts=4, d_shared=8, n_dense=1)
WITH_EXPERTS = replace(CONFIG, experts=EXPERTS, dropout=DropoutConfig(residual=0.1))


@pytest.mark.parametrize("adapter", [AdapterConfig("lora", rank=3), KINDS["prefix"], KINDS["prefix_plus"]])
def test_a_model_with_experts_is_adapted_beside_them(adapter):
    """Its routers and experts stay frozen, and pass gradients on to adapters below them."""
    tokens_BT = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(3))
    assert adapter.misfits(WITH_EXPERTS) == []
    model = born(WITH_EXPERTS, 0).double()
    with torch.no_grad():
        before = model.eval()(tokens_BT)
    attach(model, adapter)
    initialize_adapter(model, WITH_EXPERTS.init, 0)
    with torch.no_grad():
        assert torch.equal(model(tokens_BT), before) == (adapter.kind != "prefix")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter += 0.1
    masks = Dropout(WITH_EXPERTS.dropout, torch.from_numpy(keys_of_samples(0, range(3))))
    losses = next_token_loss(model.train(), tokens_BT, dropout=masks)
    losses.objective.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().max() > 0) == is_adapter(name), name
    # The gradient's size too, by the slope of the loss.
    parameter, step = next(p for name, p in model.named_parameters() if is_adapter(name)), 1e-6
    at = tuple([0] * parameter.ndim)
    with torch.no_grad():
        parameter[at] += step
        above = next_token_loss(model, tokens_BT, dropout=masks).objective
        parameter[at] -= 2 * step
        slope = (above - next_token_loss(model, tokens_BT, dropout=masks).objective) / (2 * step)
    assert slope.item() == pytest.approx(parameter.grad[at].item(), rel=1e-3)
