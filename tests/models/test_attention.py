"""One attention with each of its value aggregations, against explicit matrices in float64, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birthmark.models.attention import Attention
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.kernels import causal_lse, effective_tokens

B, T, D, H = 2, 11, 24, 4
AGGREGATIONS = {
    "plain": AttentionConfig(),
    "headnorm": AttentionConfig("headnorm"),
} | {
    f"{n_eff}, {direction}, t_ref {t_ref}, gradient {gradient}": AttentionConfig(
        "calibrated", calibration=CalibrationConfig(n_eff, direction, t_ref, gradient)
    )
    for n_eff, direction, t_ref, gradient in product(
        ("analytic", "exact"), ("amplify", "attenuate"), (None, 7), (True, False)
    )
    # The others set what nothing reads, and are refused.
    if (t_ref is None or direction == "attenuate") and (gradient or n_eff == "exact")
}
AROUND = {
    "gate per head": AttentionConfig(gate="head"),
    "gate per channel": AttentionConfig(gate="channel"),
    "norm of each head's queries and keys": AttentionConfig(qk_norm="head"),
    "norm of all queries and keys": AttentionConfig(qk_norm="width"),
    "all at once": AttentionConfig("headnorm", gate="channel", qk_norm="head"),
    "all at once, exact": AttentionConfig("calibrated", gate="head", qk_norm="width"),
}


class Deaf:
    """An observer that ignores everything: with it, attention takes the path that knows the log-sum-exp."""

    def residual(self, *args):
        pass

    def attention(self, *args):
        pass


def build(aggregation: AttentionConfig, **config) -> Attention:
    """Attention in float64, gains and biases random too."""
    config = ModelConfig(d_model=D, n_heads=H, max_seq_len=32, norm_eps=1e-3, attention=aggregation, **config)
    generator = torch.Generator().manual_seed(0)
    module = Attention(config, block=0).double()
    with torch.no_grad():
        for parameter in module.parameters():
            # Scores of size 1 to 3: attention far from uniform.
            spread = 0.35 if parameter.ndim == 2 else 1.0
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def turn(x_TK: Tensor, angles: Tensor) -> Tensor:
    """Channel pairs (i, i + K/2) as complex numbers times e^(i·angle)."""
    a, b = x_TK.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def slow_attention(
    p: dict[str, Tensor], x: Tensor, kv_heads: int, kind: AttentionConfig, angles: Tensor | None
) -> Tensor:
    """The definition, a head of a sequence at a time, with the whole matrix of weights."""
    width = D // H

    def project(name, n):
        y = x @ p[f"{name}.weight"].T
        if f"{name}.bias" in p:
            y = y + p[f"{name}.bias"]
        normed = kind.qk_norm if name in "qk" else "none"
        if normed == "width":
            y = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * p[f"{name}.norm.gain"]
        y = y.view(B, T, n, width)
        if normed == "head":
            y = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * p[f"{name}.norm.gain"]
        return y

    q, k, v = project("q", H), project("k", kv_heads), project("v", kv_heads)
    sequences = []
    for b in range(B):
        heads = []
        for h in range(H):
            g = h // (H // kv_heads)  # neighbouring query heads share keys and values
            q_h, k_h = q[b, :, h], k[b, :, g]
            if angles is not None:
                q_h, k_h = turn(q_h, angles), turn(k_h, angles)
            rows = []
            for t in range(T):
                a = torch.softmax(k_h[: t + 1] @ q_h[t] / width**0.5, dim=0)
                o = a @ v[b, : t + 1, g]
                if kind.aggregation == "headnorm":
                    o = o / (o.square().mean() + 1e-3).sqrt() * p["aggregate.gain"]
                if kind.aggregation == "calibrated":
                    c = kind.calibration
                    n_eff = torch.tensor(t + 1.0, dtype=torch.float64) if c.n_eff == "analytic" else 1 / (a * a).sum()
                    reference = (c.t_ref or 32) if c.direction == "attenuate" else 1
                    factor = (n_eff / reference).sqrt()
                    o = o * (factor if c.gradient else factor.detach())
                if kind.gate != "none":
                    bias = p.get("gate.map.bias", torch.zeros(1))
                    opening = 1 / (1 + torch.exp(-(p["gate.map.weight"] @ x[b, t] + bias)))
                    o = o * (opening[h] if kind.gate == "head" else opening[h * width : (h + 1) * width])
                rows.append(o)
            heads.append(torch.stack(rows))
        sequences.append(torch.cat(heads, dim=-1))
    out = torch.stack(sequences) @ p["o.weight"].T
    return out + p["o.bias"] if "o.bias" in p else out


@pytest.mark.parametrize(
    ("kv_heads", "bias", "rope", "observed"),
    [(4, False, False, False), (2, True, True, False), (1, False, True, True)],
)
@pytest.mark.parametrize("name", AGGREGATIONS | AROUND)
def test_outputs_and_all_gradients_equal_the_explicit_matrix(name, kv_heads, bias, rope, observed):
    kind = (AGGREGATIONS | AROUND)[name]
    module = build(kind, n_kv_heads=kv_heads, bias=bias)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    angles = torch.arange(T)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64) if rope else None
    rotation = None if angles is None else torch.stack([angles.cos(), angles.sin()])

    parameters = dict(module.named_parameters())
    out = module(x, rotation, 1, Deaf() if observed else None)
    expected = slow_attention(parameters, x, kv_heads, kind, angles)
    # The analytic factor √(t+1) is a float32 number.
    tolerance = 1e-6 if "analytic" in name else 1e-10
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    inputs = [x, *parameters.values()]
    got, wanted = (torch.autograd.grad((y * upstream).sum(), inputs) for y in (out, expected))
    for parameter, g, w in zip(["x", *parameters], got, wanted, strict=True):
        torch.testing.assert_close(
            g, w, atol=10 * tolerance, rtol=tolerance, msg=lambda m, n=parameter: f"gradient of {n}: {m}"
        )


def test_a_gradient_through_the_exact_factor_is_another_gradient():
    """Else the test above would hold with the knob ignored on both sides."""
    gradients = []
    for gradient in (True, False):
        module = build(AttentionConfig("calibrated", calibration=CalibrationConfig("exact", gradient=gradient)))
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        module(x, None, 1).square().sum().backward()
        gradients.append(module.q.weight.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 0.01 * gradients[0].abs().max()


@pytest.mark.parametrize("blocks", [[1], [0, 2], [], None])
@pytest.mark.parametrize("name", ["headnorm", "exact, amplify, t_ref None, gradient True"])
def test_an_aggregation_applies_to_the_blocks_named_and_no_others(name, blocks):
    kind = AGGREGATIONS[name]
    attention = AttentionConfig(kind.aggregation, blocks, kind.calibration)
    config = ModelConfig(
        d_model=D, n_heads=H, n_layers=3, vocab_size=50, max_seq_len=32, norm_eps=1e-3, attention=attention
    )
    model = born(config, 0).double()
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            parameters = dict(block.attn.named_parameters())
            chosen = kind if blocks is None or i in blocks else AttentionConfig()
            torch.testing.assert_close(block.attn(x, None, 1), slow_attention(parameters, x, H, chosen, None))
            assert ("aggregate.gain" in parameters) == (chosen.aggregation == "headnorm")


def test_attenuation_never_exceeds_one_up_to_the_reference_length():
    """At the default reference, max_seq_len, the last position is left as it is and earlier ones shrink."""
    module = build(AGGREGATIONS["analytic, attenuate, t_ref None, gradient True"])
    o = torch.ones(1, H, 32, D // H, dtype=torch.float64)
    factors = module.aggregate(o, o, o, None, 1.0)[0, 0, :, 0]
    torch.testing.assert_close(factors, ((torch.arange(32.0).double() + 1) / 32).sqrt(), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("n_eff", ["analytic", "exact"])
def test_uniform_attention_over_independent_values_gets_equal_variance(n_eff):
    """[BB]: where queries are 0 both forms multiply by √(t+1), and σ²(t) = σ_v²/(t+1) becomes σ_v²."""
    module = build(AttentionConfig("calibrated", calibration=CalibrationConfig(n_eff)))
    with torch.no_grad():
        module.q.weight.zero_()
        module.o.weight.copy_(torch.eye(D))
        module.v.weight.copy_(torch.eye(D))
    x = torch.randn(2000, 16, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        variance = module(x, None, 1).var(0).mean(-1)
    # 2000 · 24 draws each: a standard error of √(2/48000) = .0065.
    assert (variance - 1).abs().max() < 5 * 0.0065


def test_head_wise_rms_is_one_before_the_gain_and_the_gain_is_shared_by_heads():
    config = ModelConfig(d_model=D, n_heads=H, max_seq_len=32, norm_eps=1e-20, attention=AttentionConfig("headnorm"))
    aggregate = Attention(config, 0).double().aggregate
    assert aggregate.gain.shape == (D // H,)
    o = torch.randn(B, H, T, D // H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    o = o * torch.logspace(-3, 3, T, dtype=torch.float64)[:, None]  # sizes of every kind
    rms = aggregate(o, o, o, None, 1.0).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms))


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 24), spread=st.floats(0.0, 6.0), seed=st.integers(0, 50))
def test_the_exact_factor_lies_between_one_and_that_of_uniform_attention(length, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (spread * torch.randn(1, H, length, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    n_eff = effective_tokens(q, k, causal_lse(q, k, 0.4), 0.4)
    aggregate = build(AttentionConfig("calibrated")).aggregate
    factor = aggregate(torch.ones_like(q), q, k, causal_lse(q, k, 0.4), 0.4)
    torch.testing.assert_close(factor, n_eff.sqrt()[..., None].expand_as(factor))
    upper = torch.arange(1, length + 1, dtype=torch.float64)[:, None].sqrt()
    assert bool((factor >= 1 - 1e-9).all())
    assert bool((factor <= upper * (1 + 1e-9)).all())


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_bf16_autocast_stays_near_float32(name):
    """What training runs in. Two sides of one module; errors are a few bf16 roundings (4e-3 each)."""
    module = build(AGGREGATIONS[name]).float()
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    exact = module(x, None, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = module(x, None, 1)
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).abs().max() < 0.05 * exact.abs().max()
    rough.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())
