"""Simulated quantisation against loops over channels and tokens, and models left as they were."""

import copy

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import spearmanr

from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.measure.hf import HFModel
from birthmark.measure.quantised.cost import quantisation_costs
from birthmark.measure.quantised.linear_maps import linear_maps, quantised
from birthmark.measure.quantised.rounding import Bits, read_bits, rounded
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

V = 40
PROBE = random_probe(V, 6, 12, 0)
GATED = AttentionConfig(gate="channel")
CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=V, max_seq_len=12, attention=GATED)


def slow(x, bits):
    """Row by row, in numpy's float64 and back."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]).double().numpy():
        step = np.abs(row).max() / (2 ** (bits - 1) - 1)
        rows.append(row if step == 0 else step * np.rint(row / step))
    return torch.from_numpy(np.array(rows)).reshape(x.shape).float()


@pytest.fixture(scope="module")
def ours():
    return born(CONFIG, 0)


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    no_ends = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(vocab_size=V, n_positions=12, n_embd=16, n_layer=2, n_head=2, **no_ends)
    return HFModel(transformers.GPT2LMHeadModel(config).eval())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_that_of_each_row(bits):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    x[1, 2] = 0
    found = rounded(x, bits, -1)
    torch.testing.assert_close(found, slow(x, bits), rtol=1e-5, atol=1e-6)
    assert max(len(row.unique()) for row in found.flatten(0, 1)) <= 2**bits - 1
    torch.testing.assert_close(rounded(x.mT, bits, 1), found.mT)
    assert rounded(x.bfloat16(), bits, -1).dtype == torch.bfloat16
    assert rounded(x, 16, -1) is x


def test_settings_are_read_or_refused_in_a_line():
    assert read_bits("w8a8, w4a16,w16a4") == [Bits(8, 8), Bits(4, 16), Bits(16, 4)]
    for text in ("", "w8", "8a8", "w9a8", "w1a4", "w4a4,", "w04a4x"):
        with pytest.raises(UsageError, match=r"--bits .*is no setting; give bits of weights and activations, 2 to 8"):
            read_bits(text)
    with pytest.raises(UsageError, match="w4a4 stands there twice"):
        read_bits("w4a4,w4a4")


def _inputs_and_outputs(model, maps):
    seen = {}
    handles = []
    for i, (module, _) in enumerate(maps):
        keep = lambda m, args, y, i=i: seen.update({i: (args[0].clone(), y.clone())})  # noqa: E731
        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(torch.from_numpy(PROBE))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_every_linear_map_of_the_blocks_gets_rounded_weights_and_inputs(kind, request):
    model = request.getfixturevalue(kind)
    maps = linear_maps(model)
    assert len(maps) == 2 * {"ours": 8 if CONFIG.gated else 7, "theirs": 4}[kind]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    weights = [(m.weight if dim == 1 else m.weight.T).detach().clone() for m, dim in maps]
    with quantised(model, Bits(4, 3)):
        seen = _inputs_and_outputs(model, maps)
        inside = model.state_dict()
        changed = {name for name, value in before.items() if not torch.equal(value, inside[name])}
        assert len(changed) == len(maps)
        for i, weight in enumerate(weights):
            module, dim = maps[i]
            now = module.weight if dim == 1 else module.weight.T
            torch.testing.assert_close(now, slow(weight, 4), rtol=1e-5, atol=1e-7)
            x, y = seen[i]
            torch.testing.assert_close(x, slow(x, 3), rtol=1e-4, atol=1e-5)  # on the grid already
            if type(module) is torch.nn.Linear or dim == 0:
                bias = 0 if module.bias is None else module.bias
                torch.testing.assert_close(y, x @ now.T + bias, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m, _ in maps)


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_loss_and_preference_are_those_of_a_model_with_such_weights(kind, request):
    model = request.getfixturevalue(kind)
    rounded_model = copy.deepcopy(model)
    with torch.no_grad():
        for module, dim in linear_maps(rounded_model):
            module.weight.copy_(slow(module.weight, 4) if dim == 1 else slow(module.weight.T, 4).T)
    tokens = torch.from_numpy(PROBE)
    expected = []
    for each in (model, rounded_model):
        with torch.no_grad():
            log_p = each(tokens).double().log_softmax(-1)
        loss = -log_p[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].mean(1).numpy()
        expected.append((loss, log_p[:, -1].exp().mean(0).numpy()))
    for batch_size in (2, 64):
        plain, found = quantisation_costs(model, [Bits(4, 16)], PROBE, PROBE, batch_size=batch_size)
        (loss, p), (loss_4, p_4) = expected
        assert [plain.bits, found.bits] == ["w16a16", "w4a16"]
        assert [plain.increase, plain.rank_correlation] == [0, 1]
        assert plain.loss == pytest.approx(loss.mean(), rel=1e-6)
        assert found.loss == pytest.approx(loss_4.mean(), rel=1e-5)
        assert found.increase == pytest.approx((loss_4 - loss).mean(), rel=1e-2, abs=1e-6)
        assert found.increase_se == pytest.approx((loss_4 - loss).std(ddof=1) / 6**0.5, rel=1e-2)
        assert found.preference_ratio == pytest.approx(V * p_4.max(), rel=1e-5)
        assert found.rank_correlation == pytest.approx(spearmanr(p, p_4).statistic, abs=1e-3)


def test_padding_does_not_count(ours):
    documents = np.zeros_like(PROBE)
    documents[:, 7:] = -1
    (short,) = quantisation_costs(ours, [], PROBE[:, :7], PROBE)
    (padded,) = quantisation_costs(ours, [], PROBE, PROBE, documents_NT=documents)
    assert padded.loss == pytest.approx(short.loss, rel=1e-6)


def test_stacked_experts_are_refused_by_name(theirs):
    odd = copy.deepcopy(theirs)
    odd.model.transformer.h[0].mlp.register_parameter("experts", torch.nn.Parameter(torch.zeros(2, 3, 4)))
    with pytest.raises(UsageError, match=r"h\.0\.mlp\.experts holds several matrices in one"):
        linear_maps(odd)
