"""ρ, the correlation of values across positions, and what correlated calibration makes of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import Seen
from triton_kernels import WAYS, interpret

from birthmark.models.attention import correlation
from birthmark.models.attention.correlation import EstimatedCorrelation, LearnedCorrelation, first_moment_tokens
from birthmark.models.attention.fused import rows
from birthmark.models.birth import born, digest
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig

CONFIG = ModelConfig(
    d_model=64, n_layers=3, n_heads=4, vocab_size=512, max_seq_len=64,
    attention=AttentionConfig("calibrated", calibration=CalibrationConfig(correlation="estimated")),
)  # fmt: skip


def values(rho, n=400, length=24, seed=0, mean=3.0):
    """Values ``[B, H, S, K]`` of 4 heads whose positions correlate with ``rho`` by construction, off centre."""
    rng = np.random.default_rng(seed)
    rho = np.asarray(rho)[:, None, None]
    shared, own = rng.normal(size=(n, 4, 1, 16)), rng.normal(size=(n, 4, length, 16))
    return torch.from_numpy(np.sqrt(rho) * shared + np.sqrt(1 - rho) * own + mean * rng.normal(size=(1, 4, 1, 16)))


@pytest.fixture(params=WAYS)
def device(request, monkeypatch):
    if request.param == "interpreter":
        # Several parts of a head's positions, the last cut short; of the longest as many as there may be.
        interpret(monkeypatch, rows, _TILE=32)
        interpret(monkeypatch, correlation, _TILES=2, _PARTS=4)
    return "cuda" if request.param == "cuda" else "cpu"


def test_the_estimate_is_the_correlation_that_was_put_in():
    rho = [0.0, 0.2, 0.5, 0.9]
    found = EstimatedCorrelation(CONFIG)(values(rho).float())
    assert found.shape == (4, 1)
    # 400·16 shared draws: a standard error of at most √(2/6400) = .018.
    np.testing.assert_allclose(found[:, 0], rho, atol=4 * 0.018)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n_heads", "n_groups", "width"), [(4, 4, 16), (4, 1, 16), (6, 3, 12)])
def test_the_first_batch_decides_alone_and_later_ones_count_a_tenth(device, dtype, n_heads, n_groups, width):
    """Against the formulas in float64, of heads that share values too, over sequences of three lengths."""
    part = EstimatedCorrelation(replace(CONFIG, n_heads=n_heads, head_dim=width)).to(device)
    n_shared = n_heads // n_groups
    shapes = (([0.1, 0.3, 0.6, 0.9], 37), ([0.8, 0.2, 0.5, 0.1], 9), ([0.9] * 4, 2))
    batches = [values(rho, 6, length, seed, 0.5)[:, :n_groups, :, :width] for seed, (rho, length) in enumerate(shapes)]
    moments = None
    for v in batches:
        v = v.to(dtype)
        # The heads of a position side by side, as projections leave them.
        found = part(v.transpose(1, 2).contiguous().transpose(1, 2).to(device)).cpu()
        v = v.double().numpy()
        new = [v.mean((0, 2)), (v**2).sum(-1).mean((0, 2)), (v.mean(2) ** 2).sum(-1).mean(0), v.shape[2]]
        moments = new if moments is None else [0.9 * old + 0.1 * one for old, one in zip(moments, new, strict=True)]
        mean, square, of_means, n = moments
        centre = (mean**2).sum(-1)
        wanted = (n * (of_means - centre) - (square - centre)) / ((n - 1) * (square - centre))
        np.testing.assert_allclose(found[:, 0], np.clip(wanted, 0, 0.999).repeat(n_shared), rtol=2e-5)
    assert part.n_batches == 3
    np.testing.assert_allclose(part.mean_HK.cpu(), mean.repeat(n_shared, 0), rtol=1e-5, atol=1e-6)


def test_evaluation_freezes_it_and_before_the_first_batch_it_is_zero():
    part = EstimatedCorrelation(CONFIG).eval()
    assert (part(values([0.5] * 4).float()) == 0).all()
    part.train()
    found = part(values([0.5] * 4).float())
    part.eval()
    assert torch.equal(part(values([0.9] * 4).float()), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_conversion_never_rounds_moments_below_float32(dtype):
    """ρ is a small difference of the moments where values have a mean."""
    part = EstimatedCorrelation(CONFIG)
    part(values([0.1, 0.3, 0.6, 0.9], mean=4.0).float())
    part.eval()
    v, exact = values([0.5] * 4).float(), part(values([0.5] * 4).float())
    moments = [moment.clone() for moment in part.buffers()]
    part.to(dtype)
    assert all(torch.equal(one, other.float()) for one, other in zip(moments, part.buffers(), strict=True))
    torch.testing.assert_close(part(v.to(dtype)).float(), exact, atol=2e-6, rtol=1e-5)


def test_learned_correlations_start_where_config_says_and_get_gradients():
    attention = AttentionConfig("calibrated", calibration=CalibrationConfig(correlation="learned", rho=0.3))
    model = born(replace(CONFIG, attention=attention), 0)
    parts = [m for m in model.modules() if isinstance(m, LearnedCorrelation)]
    assert len(parts) == 3
    for part in parts:
        torch.testing.assert_close(part(torch.zeros(1)), torch.full((4, 1), 0.3))
    model(torch.arange(40)[None]).square().sum().backward()
    assert all(part.logit.grad.abs().min() > 0 for part in parts)


def test_a_birth_settles_by_its_seed_alone_and_leaves_the_mode_as_it_was():
    torch.manual_seed(1)
    one = born(CONFIG, 0)
    torch.manual_seed(2)
    two, other = born(CONFIG, 0), born(CONFIG, 1)
    for (name, a), (_, b), (_, c) in zip(one.named_buffers(), two.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c) or name.endswith(("n_batches", "length"))
    assert one.training
    assert digest(one) == digest(two)
    # Paired births: the parameters are those of the plain arm.
    assert digest(one) == digest(born(replace(CONFIG, attention=AttentionConfig()), 0))
    parts = [part for part in one.eval().modules() if isinstance(part, EstimatedCorrelation)]
    rho = torch.stack([part(torch.zeros(1, 1, 1, 1))[:, 0] for part in parts])
    # Values of different positions are independent in the first block, and share what attention averaged further on.
    assert rho[0].max() < 0.1
    assert rho[1:].mean() > 0.2


@pytest.mark.parametrize(("max_seq_len", "length"), [(64, 64), (300, 128)])
def test_a_birth_settles_on_32_random_sequences_as_long_as_its_own_or_128(max_seq_len, length):
    tokens_NT = first_moment_tokens(512, max_seq_len, 0)
    assert tokens_NT.shape == (32, length)
    # Every token is as likely: 4 standard errors of the mean.
    assert abs(tokens_NT.double().mean() - 255.5) < 4 * 512 / (12 * tokens_NT.numel()) ** 0.5
    assert (tokens_NT.min(), tokens_NT.max()) == (0, 511)
    model = born(replace(CONFIG, n_layers=1, max_seq_len=max_seq_len), 0).eval()
    (part,) = (part for part in model.modules() if isinstance(part, EstimatedCorrelation))
    assert (part.n_batches, part.length) == (1, length)
    seen = Seen()
    with torch.no_grad():
        model(tokens_NT, observer=seen)
    v_BHSK = seen.attended[1].v_BHTK.double()
    torch.testing.assert_close(part.mean_HK.double(), v_BHSK.mean((0, 2)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(part.square_H.double(), v_BHSK.square().sum(-1).mean((0, 2)), rtol=1e-5, atol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("correlation", ["none", "estimated"])
def test_the_correlated_form_equalises_every_layer_where_the_exact_one_inverts_them(correlation):
    """facts: σ²(0)/σ²(late) stays near 1 in every layer with ρ, and falls below .1 without it after the first."""
    attention = AttentionConfig("calibrated", calibration=CalibrationConfig(correlation=correlation))
    config = replace(CONFIG, attention=attention, vocab_size=4096, init=replace(CONFIG.init, kind="normal"))
    model, seen = born(config, 0).eval(), Seen()
    with torch.no_grad():
        model(torch.from_numpy(np.random.default_rng(0).integers(0, 4096, (256, 64))), observer=seen)
    variances = [attended.out_BHTK.var(0).mean((0, 2)) for attended in seen.attended.values()]
    ratios = [float(variance[0] / variance[32:].mean()) for variance in variances]
    assert 0.85 < ratios[0] < 1.15
    if correlation == "none":
        assert max(ratios[1:]) < 0.1
    else:
        assert min(ratios[1:]) > 0.8
        assert max(ratios[1:]) < 1.25


TWO_RANKS = """
import sys
import torch
import torch.distributed as dist
from birthmark.models.attention.correlation import EstimatedCorrelation
from birthmark.models.config import ModelConfig

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
part = EstimatedCorrelation(ModelConfig(d_model=64, n_heads=4))
v = torch.randn(8, 4, 10, 16, generator=torch.Generator().manual_seed(0)) + 1
part(v[rank::2])
torch.save(dict(part.named_buffers()), out)
"""


def test_two_ranks_have_the_same_moments_those_of_all_their_sequences(two_ranks):
    outs = two_ranks(TWO_RANKS, ".pt")
    whole = EstimatedCorrelation(ModelConfig(d_model=64, n_heads=4))
    whole(torch.randn(8, 4, 10, 16, generator=torch.Generator().manual_seed(0)) + 1)
    one, two = (torch.load(out, weights_only=True) for out in outs)
    for name, expected in whole.named_buffers():
        assert torch.equal(one[name], two[name]), name
        torch.testing.assert_close(one[name], expected, msg=name)
