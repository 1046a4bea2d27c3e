"""One attention with each of its value aggregations, against explicit matrices in float64, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birthmark.models.attention import normalisers
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.config import SIMILARITIES
from birthmark.models.attention.kernel_choice import explicit_because
from birthmark.models.attention.normalisers import Explicit, FusedSoftmax
from birthmark.models.attention.positions import Placement, RotaryPositions
from birthmark.models.attention.rotation import rotate, turning
from birthmark.models.attention.scores import Scores
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig

B, T, D, H = 2, 11, 24, 4
AGGREGATIONS = {
    "plain": AttentionConfig(),
    "headnorm": AttentionConfig("headnorm"),
    "headnorm as released": AttentionConfig("headnorm_released"),
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
CORRELATED = {
    f"{n_eff}, {direction}, ρ {correlation}": AttentionConfig(
        "calibrated", calibration=CalibrationConfig(n_eff, direction, correlation=correlation)
    )
    for n_eff, direction, correlation in product(
        ("analytic", "exact"), ("amplify", "attenuate"), ("estimated", "learned")
    )
}
NORMALISERS = {
    "off by one": AttentionConfig(normaliser="softmax_off_by_one"),
    "learned sink": AttentionConfig(normaliser="softmax_sink"),
    "sigmoid, bias": AttentionConfig(normaliser="sigmoid", sigmoid_bias="log_length"),
} | {
    f"{kind}{', normalised' if rows else ''}": AttentionConfig(normaliser=kind, normalise_rows=rows)
    for kind, rows in product(SIMILARITIES, (False, True))
}
AROUND = {
    "gate per head": AttentionConfig(gate="head"),
    "gate per channel": AttentionConfig(gate="channel"),
    "norm of each head's queries and keys": AttentionConfig(qk_norm="head"),
    "norm of all queries and keys": AttentionConfig(qk_norm="width"),
    "biases of queries, keys and values": AttentionConfig(qkv_bias=True),
    "no biases of queries, keys and values": AttentionConfig(qkv_bias=False),
    "all at once": AttentionConfig("headnorm", gate="channel", qk_norm="head"),
    "all at once, exact": AttentionConfig("calibrated", gate="head", qk_norm="width"),
    "calibrated beside a sink": AttentionConfig("calibrated", normaliser="softmax_sink", kv_bias="key"),
    "calibrated beside a sink, explicit": AttentionConfig("calibrated", normaliser="softmax_off_by_one", prefix=2),
    "a window": AttentionConfig(window=4),
    "a window of one": AttentionConfig(window=1),
    "a window longer than the text": AttentionConfig(window=40),
    "a prefix": AttentionConfig(prefix=3),
    "a prefix longer than the text": AttentionConfig(prefix=20),
    "a window and a prefix": AttentionConfig(window=2, prefix=5),
    "key bias": AttentionConfig(kv_bias="key"),
    "value bias": AttentionConfig(kv_bias="value"),
    "key and value bias": AttentionConfig(kv_bias="key_value"),
    "one key and value bias": AttentionConfig(kv_bias="key_value", kv_bias_shared=True),
}
# What meets in one row of weights, pairwise and more.
TOGETHER = {
    "sink, key bias, window, exact": AttentionConfig(
        "calibrated", normaliser="softmax_sink", kv_bias="key_value", window=4
    ),
    "off by one, prefix, window, headnorm": AttentionConfig(
        "headnorm", normaliser="softmax_off_by_one", prefix=4, window=3
    ),
    "normalised sigmoid, key bias, window": AttentionConfig(
        normaliser="sigmoid", normalise_rows=True, kv_bias="key", window=5
    ),
    "relu, key and value bias, prefix": AttentionConfig(normaliser="relu", kv_bias="key_value", prefix=4),
    "identity, normalised, key bias": AttentionConfig(normaliser="identity", normalise_rows=True, kv_bias="key_value"),
    "normalised elu, exact, estimated": AttentionConfig(
        "calibrated",
        normaliser="elu",
        normalise_rows=True,
        calibration=CalibrationConfig(correlation="estimated", direction="attenuate"),
    ),
    "off by one, exact, learned": AttentionConfig(
        "calibrated", normaliser="softmax_off_by_one", calibration=CalibrationConfig(correlation="learned"), prefix=2
    ),
}
#: Beside aggregations: a similarity of its own is a matrix on every device.
ON_KERNELS = [name for name, kind in (NORMALISERS | AROUND | TOGETHER).items() if "softmax" in kind.normaliser]
ARMS = AGGREGATIONS | CORRELATED | NORMALISERS | AROUND | TOGETHER


class Deaf:
    """An observer that ignores everything: with it, attention takes the path that knows the log-sum-exp."""

    def residual(self, *args):
        pass

    def attention(self, *args):
        pass

    def neurons(self, *args):
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


def weighted_sum_of(o: Tensor, q: Tensor | None = None, k: Tensor | None = None) -> FusedSoftmax:
    """Outputs as if they had come from attention with these queries and keys."""
    q, k = torch.zeros_like(o) if q is None else q, torch.zeros_like(o) if k is None else k
    weighted = FusedSoftmax(Scores(q, k, 0.4, Placement()), torch.zeros_like(o), [], needs_weights=True)
    weighted.o_BHTK = o
    return weighted


def turn(x_TK: Tensor, angles: Tensor) -> Tensor:
    """Channel pairs (i, i + K/2) as complex numbers times e^(i·angle)."""
    a, b = x_TK.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def slow_correlation(v: Tensor) -> Tensor:
    """Mean correlation of different positions' values of one head ``[B, T, K]``, a pair at a time."""
    v = v - v.mean((0, 1))
    apart = sum((v[:, t] * v[:, t]).sum(-1).mean() for t in range(T)) / T
    together = sum((v[:, t] * v[:, u]).sum(-1).mean() for t in range(T) for u in range(T) if t != u) / (T * (T - 1))
    return (together / apart).clamp(0, 0.999)


def slow_attention(
    p: dict[str, Tensor],
    x: Tensor,
    kv_heads: int,
    kind: AttentionConfig,
    angles: Tensor | None = None,
    distance_bias: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """The definition, a query of a head of a sequence at a time, with whole rows of weights."""
    width, t_max = D // H, 32

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

    similarity = {
        "sigmoid": lambda s: 1 / (1 + torch.exp(-s + (math.log(t_max) if kind.sigmoid_bias != "none" else 0))),
        "relu": lambda s: s * (s > 0),
        "elu": lambda s: torch.where(s > 0, s + 1, s.exp()),
        "identity": lambda s: s,
    }.get(kind.normaliser, torch.exp)
    q, k, v = project("q", H), project("k", kv_heads), project("v", kv_heads)
    sequences = []
    for b in range(B):
        heads = []
        for h in range(H):
            g = h // (H // kv_heads)  # neighbouring query heads share keys and values
            g_bias = 0 if kind.kv_bias_shared else g
            q_h, k_h = q[b, :, h], k[b, :, g]
            if angles is not None:
                q_h, k_h = turn(q_h, angles), turn(k_h, angles)
            rows = []
            for t in range(T):
                first = 0 if kind.window is None else max(0, t - kind.window + 1)
                seen = [j for j in range(T) if first <= j <= t or max(t, j) < (kind.prefix or 0)]
                s = k_h[seen] @ q_h[t] / width**0.5
                if distance_bias is not None:
                    s = s + distance_bias[h, [abs(t - j) for j in seen]]
                a, others = similarity(s), []
                if kind.kv_bias in ("key", "key_value"):
                    others.append(similarity(p["bias.key"][g_bias] @ q_h[t] / width**0.5))
                total = a.sum() + sum(others)
                without_value = list(others) if kind.kv_bias == "key" else []
                if kind.normaliser == "softmax_off_by_one":
                    without_value.append(torch.ones((), dtype=torch.float64))
                    total = total + 1
                if kind.normaliser == "softmax_sink":
                    without_value.append(p["normaliser.logit"][h].exp())
                    total = total + without_value[-1]
                if kind.normaliser in SIMILARITIES:
                    small = 1.0 if kind.normaliser == "identity" else 1e-6
                    total = total.abs().clamp_min(small) if kind.normalise_rows else torch.ones(())
                a = a / total
                o = a @ v[b, seen, g]
                if kind.kv_bias == "key_value":
                    o = o + others[0] / total * p["bias.value"][g_bias]
                if kind.kv_bias == "value":
                    o = o + p["bias.value"][g_bias]
                if kind.aggregation == "headnorm":
                    o = o / (o.square().mean() + 1e-3).sqrt() * p["aggregate.gain"]
                if kind.aggregation == "headnorm_released":
                    o = o / (o.square().mean() + 1e-3).sqrt() * p["aggregate.gain"][h]
                if kind.aggregation == "calibrated":
                    c = kind.calibration
                    n_eff = torch.tensor(t + 1.0, dtype=torch.float64)
                    if c.n_eff == "exact":
                        n_eff = 1 / ((a * a).sum() + sum((one / total) ** 2 for one in without_value))
                    rho = torch.zeros((), dtype=torch.float64)
                    if c.correlation == "learned":
                        rho = 1 / (1 + torch.exp(-p["aggregate.rho.logit"][h]))
                    if c.correlation == "estimated":
                        rho = slow_correlation(v[:, :, g].detach()) if training else rho
                    factor = (rho + (1 - rho) / n_eff) ** -0.5
                    if c.direction == "attenuate":
                        factor = factor / (rho + (1 - rho) / (c.t_ref or t_max)) ** -0.5
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


#: What each kind of positions is to one attention: whether it turns, and additions to scores by head and distance.
PLACES = ("none", "rope", "alibi", "t5")
SLOPES = torch.tensor([0.25, 0.0625, 0.5, 0.1])
T5_BIAS = torch.randn(H, T, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def place(kind: str) -> tuple[Placement, Tensor | None, Tensor | None]:
    """What attention is given, and for the definition: angles of each position, additions by distance."""
    if kind == "rope":
        angles = torch.arange(T)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
        return Placement(rotation=turning(angles)), angles, None
    if kind == "alibi":
        return Placement(slopes_H=SLOPES), None, -SLOPES.double()[:, None] * torch.arange(T)
    if kind == "t5":
        return Placement(bias_HS=T5_BIAS), None, T5_BIAS
    return Placement(), None, None


def agree(name, kind, positions="none", kv_heads=H, bias=False, observed=False):
    """Outputs and all gradients of one attention and of the definition."""
    module = build(kind, n_kv_heads=kv_heads, bias=bias)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    given, angles, distance_bias = place(positions)

    parameters = dict(module.named_parameters())
    out = module(x, given, Deaf() if observed else None)
    expected = slow_attention(parameters, x, kv_heads, kind, angles, distance_bias)
    # The analytic factor √(t+1), a running ρ and the slopes are float32 numbers.
    rough = kind.calibration.n_eff == "analytic" or kind.calibration.correlation != "none" or positions == "alibi"
    tolerance = 3e-6 if rough else 1e-10
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    inputs = [x, *parameters.values()]
    got, wanted = (torch.autograd.grad((y * upstream).sum(), inputs, allow_unused=True) for y in (out, expected))
    for parameter, g, w in zip(["x", *parameters], got, wanted, strict=True):
        assert g is not None
        torch.testing.assert_close(
            g, w, atol=10 * tolerance, rtol=tolerance, msg=lambda m, n=parameter: f"{name}: gradient of {n}: {m}"
        )


@pytest.mark.parametrize(
    ("kv_heads", "bias", "positions", "observed"),
    [(4, False, "none", False), (2, True, "rope", False), (1, False, "rope", True)],
)
@pytest.mark.parametrize("name", ARMS)
def test_outputs_and_all_gradients_equal_the_definition(name, kv_heads, bias, positions, observed):
    agree(name, ARMS[name], positions, kv_heads, bias, observed)


@pytest.mark.parametrize("positions", ["alibi", "t5"])
@pytest.mark.parametrize("name", NORMALISERS | AROUND | TOGETHER | {"exact": None})
def test_penalties_on_distance_compose_with_every_row_of_weights(name, positions):
    agree(name, (ARMS | {"exact": AttentionConfig("calibrated")})[name], positions, kv_heads=2)


@pytest.mark.parametrize("name", NORMALISERS | TOGETHER)
def test_explicit_blocks_change_nothing(name, monkeypatch):
    """Blocks are computed again in the backward pass: three of them here, in place of one."""
    monkeypatch.setattr(normalisers, "_QUERY_BLOCK", 5)
    agree(name, ARMS[name], "t5", kv_heads=2)


@pytest.mark.parametrize("positions", ["rope", "alibi"])
@pytest.mark.parametrize("name", ["plain", "exact, amplify, t_ref None, gradient True", *ON_KERNELS])
def test_what_runs_on_cuda_agrees_too(name, positions, cuda_operators):
    """The operators' own formulas stand in for them, under torch's schemas; heads of 6 channels are padded to 8."""
    agree(name, ARMS[name], positions, kv_heads=2)


@pytest.mark.parametrize("positions", PLACES)
@pytest.mark.parametrize("name", ARMS)
def test_the_kernel_that_is_named_is_the_one_that_runs(name, positions):
    seen = []

    class Seer(Deaf):
        def attention(self, layer, attended):
            seen.append(attended.weights)

    module = build(ARMS[name])
    module(torch.randn(1, T, D, dtype=torch.float64), place(positions)[0], Seer())
    expected = explicit_because(
        ModelConfig(positions=positions, attention=replace(ARMS[name], aggregation_blocks=None))
    )
    assert type(seen[0]) is (FusedSoftmax if expected is None else Explicit)


@pytest.mark.parametrize("positions", PLACES)
@pytest.mark.parametrize("name", NORMALISERS | AROUND | TOGETHER)
def test_an_observer_is_shown_the_weights_that_made_the_output(name, positions):
    """Rows, their sums and the sums of their squares, from the values and the outputs alone where weights are free."""
    kind, shown = ARMS[name], []

    class Seer(Deaf):
        def attention(self, layer, attended):
            shown.append(attended)

    module = build(replace(kind, gate="none", aggregation="plain", calibration=CalibrationConfig()))
    with torch.no_grad():
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        out = module(x, place(positions)[0], Seer())
    (seen,) = shown
    rows = torch.zeros(B, H, T, T, dtype=torch.float64)
    for start, stop in ((0, 3), (3, 4), (4, 11)):
        block = seen.weights.rows(start, stop)
        rows[:, :, start:stop, : block.shape[-1]] = block
    torch.testing.assert_close(seen.weights.sum_squares(), rows.square().sum(-1), atol=1e-6, rtol=1e-6)
    sums = seen.weights.row_sum()
    total = torch.ones_like(rows[..., 0]) if sums is None else sums
    torch.testing.assert_close(total, rows.abs().sum(-1), atol=1e-6, rtol=1e-6)
    # A row of ReLUs may be all zeros.
    off = (rows.sum(-1) - 1).abs() * (rows.abs().sum(-1) > 0)
    assert kind.rows_sum_to_one == bool((off < 1e-6).all())
    assert torch.equal(seen.out_BHTK, seen.o_BHTK)
    torch.testing.assert_close(out, module.o(seen.o_BHTK.transpose(1, 2).flatten(2)))
    if kind.kv_bias in ("none", "key"):
        torch.testing.assert_close(rows @ seen.v_BHTK, seen.o_BHTK, atol=1e-6, rtol=1e-6)


def test_a_gradient_through_the_exact_factor_is_another_gradient():
    """Else the test above would hold with the knob ignored on both sides."""
    gradients = []
    for gradient in (True, False):
        module = build(AttentionConfig("calibrated", calibration=CalibrationConfig("exact", gradient=gradient)))
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        module(x, Placement()).square().sum().backward()
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
            torch.testing.assert_close(block.attn(x, Placement()), slow_attention(parameters, x, H, chosen, None))
            assert ("aggregate.gain" in parameters) == (chosen.aggregation == "headnorm")


def test_attenuation_never_exceeds_one_up_to_the_reference_length():
    """At the default reference, max_seq_len, the last position is left as it is and earlier ones shrink."""
    module = build(AGGREGATIONS["analytic, attenuate, t_ref None, gradient True"])
    o = torch.ones(1, H, 32, D // H, dtype=torch.float64)
    factors = module.aggregate(weighted_sum_of(o), o)[0, 0, :, 0]
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
        variance = module(x, Placement()).var(0).mean(-1)
    # 2000 · 24 draws each: a standard error of √(2/48000) = .0065.
    assert (variance - 1).abs().max() < 5 * 0.0065


def test_head_wise_rms_is_one_before_the_gain_and_the_gain_is_shared_by_heads():
    config = ModelConfig(d_model=D, n_heads=H, max_seq_len=32, norm_eps=1e-20, attention=AttentionConfig("headnorm"))
    aggregate = Attention(config, 0).double().aggregate
    assert aggregate.gain.shape == (D // H,)
    o = torch.randn(B, H, T, D // H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    o = o * torch.logspace(-3, 3, T, dtype=torch.float64)[:, None]  # sizes of every kind
    rms = aggregate(weighted_sum_of(o), o).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms))


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 24), spread=st.floats(0.0, 6.0), seed=st.integers(0, 50))
def test_the_exact_factor_lies_between_one_and_that_of_uniform_attention(length, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (spread * torch.randn(1, H, length, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    weighted = weighted_sum_of(torch.ones_like(q), q, k)
    factor = build(AttentionConfig("calibrated")).aggregate(weighted, q)
    n_eff = 1 / weighted.rows(0, length).square().sum(-1)
    torch.testing.assert_close(factor, n_eff.sqrt()[..., None].expand_as(factor))
    upper = torch.arange(1, length + 1, dtype=torch.float64)[:, None].sqrt()
    assert bool((factor >= 1 - 1e-9).all())
    assert bool((factor <= upper * (1 + 1e-9)).all())


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_bf16_autocast_stays_near_float32(name):
    """What training runs in. Two sides of one module; errors are a few bf16 roundings (4e-3 each)."""
    module = build(AGGREGATIONS[name]).float()
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    exact = module(x, Placement())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = module(x, Placement())
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).abs().max() < 0.05 * exact.abs().max()
    rough.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_scores_of_bf16_err_no_more_than_those_that_are_rotated_in_float32(fraction):
    config = ModelConfig(d_model=64, n_heads=1, rope_fraction=fraction)
    n_turned, generator = round(64 * fraction), torch.Generator().manual_seed(0)
    q_TK, k_TK = (torch.randn(256, 64, generator=generator).bfloat16() for _ in range(2))

    def turned(x_TK, complex_dtype):
        """A pair as one complex number, times that of its angle."""
        angles = torch.outer(torch.arange(256.0), 10000.0 ** -(torch.arange(0, n_turned, 2) / n_turned)).double()
        real, imaginary = x_TK[:, :n_turned].double().chunk(2, dim=1)
        pairs = torch.complex(real, imaginary).to(complex_dtype) * torch.polar(torch.ones(()).double(), angles).to(
            complex_dtype
        )
        return torch.cat([pairs.real, pairs.imag, x_TK[:, n_turned:].to(pairs.real.dtype)], dim=1)

    truth = turned(q_TK, torch.complex128) @ turned(k_TK, torch.complex128).T

    def error(q, k):
        assert q.dtype == k.dtype == torch.bfloat16
        return (q.double() @ k.double().T - truth).square().mean().sqrt()

    in_float32 = error(*(turned(x, torch.complex64).bfloat16() for x in (q_TK, k_TK)))
    rotation = RotaryPositions(config).place(256, torch.device("cpu")).rotation
    ours = error(*(rotate(x[None, None], rotation)[0, 0] for x in (q_TK, k_TK)))
    assert ours <= 1.001 * in_float32
