"""One attention with each of its parts, against explicit matrices in float64, forward and backward."""

from dataclasses import replace

import pytest
import torch
from attention_arms import AGGREGATIONS, ARMS, AROUND, EXACT, EXPLICIT_ROWS, GATES, NORMALISERS, SEVERAL_KEYS, TOGETHER
from oracles import Seen, assert_gradients, slow_attention

from birthmark.errors import UsageError
from birthmark.models.attention import normalisers
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.config import ROWS
from birthmark.models.attention.kernel_choice import explicit_because
from birthmark.models.attention.normalisers import Explicit, FusedSoftmax
from birthmark.models.attention.positions import Placement, RotaryPositions
from birthmark.models.attention.rotation import rotate, turning
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig

B, T, D, H = 2, 11, 24, 4
#: Beside aggregations: a similarity of its own is a matrix on every device.
ON_KERNELS = [name for name, kind in (NORMALISERS | AROUND | TOGETHER).items() if "softmax" in kind.normaliser]


def build(kind, **config):
    """Attention in float64, gains and biases random too."""
    config = ModelConfig(d_model=D, n_heads=H, max_seq_len=32, norm_eps=1e-3, attention=kind, **config)
    generator = torch.Generator().manual_seed(0)
    module = Attention(config, block=0).double()
    with torch.no_grad():
        for parameter in module.parameters():
            # Scores of size 1 to 3: attention far from uniform.
            spread = 0.35 if parameter.ndim == 2 else 1.0
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module, config


#: What each kind of positions is to one attention: whether it turns, and additions to scores by head and distance.
PLACES = ("none", "rope", "alibi", "t5")
SLOPES = torch.tensor([0.25, 0.0625, 0.5, 0.1])
T5_BIAS = torch.randn(H, T, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def place(kind):
    """What attention is given, and for the definition: angles of each position, additions by distance."""
    if kind == "rope":
        angles = torch.arange(T)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
        return Placement(rotation=turning(angles)), angles, None
    if kind == "alibi":
        return Placement(slopes_H=SLOPES), None, -SLOPES.double()[:, None] * torch.arange(T)
    if kind == "t5":
        return Placement(bias_HS=T5_BIAS), None, T5_BIAS
    return Placement(), None, None


def agree(kind, positions="none", kv_heads=H, bias=False, observed=False):
    """Outputs and all gradients of one attention and of the definition."""
    module, config = build(kind, n_kv_heads=kv_heads, bias=bias)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    given, *by_hand = place(positions)
    parameters = dict(module.named_parameters())
    # With an observer, attention takes the path that knows the log-sum-exp.
    out, expected = module(x, given, Seen() if observed else None), slow_attention(parameters, x, config, *by_hand)
    # The analytic factor √(t+1), a running ρ and the slopes are float32 numbers; softpick's ε is not in the definition.
    rough = kind.calibration.n_eff == "analytic" or kind.calibration.correlation != "none" or positions == "alibi"
    rough = rough or kind.normaliser == "softpick"
    tolerance = 3e-6 if rough else 1e-10
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert_gradients(out, expected, {"x": x, **parameters}, upstream, 10 * tolerance, 10 * tolerance)


@pytest.mark.parametrize(
    ("kv_heads", "bias", "positions", "observed"),
    [(4, False, "none", False), (2, True, "rope", False), (1, False, "rope", True)],
)
@pytest.mark.parametrize("name", ARMS | EXPLICIT_ROWS)
def test_outputs_and_all_gradients_equal_the_definition(name, kv_heads, bias, positions, observed):
    agree((ARMS | EXPLICIT_ROWS)[name], positions, kv_heads, bias, observed)


def test_every_normaliser_is_compared_with_its_definition():
    """The difference of two softmaxes has its formula in test_differential.py; a new one gets an arm, and its formula
    in oracles.py.
    """
    assert {kind.normaliser for kind in (ARMS | EXPLICIT_ROWS).values()} == set(ROWS) - {"differential"}


@pytest.mark.parametrize("name", GATES | SEVERAL_KEYS)
def test_gates_at_every_place_and_several_learned_keys_equal_the_definition(name):
    agree((GATES | SEVERAL_KEYS)[name], kv_heads=2)


@pytest.mark.parametrize("positions", ["alibi", "t5"])
@pytest.mark.parametrize("name", [EXACT, *NORMALISERS, *AROUND, *TOGETHER])
def test_penalties_on_distance_compose_with_every_row_of_weights(name, positions):
    agree(ARMS[name], positions, kv_heads=2)


@pytest.mark.parametrize("name", NORMALISERS | TOGETHER)
def test_explicit_blocks_change_nothing(name, monkeypatch):
    """Blocks are computed again in the backward pass: three of them here, in place of one."""
    monkeypatch.setattr(normalisers, "_QUERY_BLOCK", 5)
    agree(ARMS[name], "t5", kv_heads=2)


@pytest.mark.parametrize("positions", ["rope", "alibi"])
@pytest.mark.parametrize("name", ["plain", EXACT, *ON_KERNELS])
def test_what_runs_on_cuda_agrees_too(name, positions, cuda_operators):
    """The operators' own formulas stand in for them, under torch's schemas; heads of 6 channels are padded to 8."""
    agree(ARMS[name], positions, kv_heads=2)


@pytest.mark.parametrize("positions", PLACES)
@pytest.mark.parametrize("name", ARMS)
def test_the_kernel_that_is_named_is_the_one_that_runs(name, positions):
    seen = Seen()
    build(ARMS[name])[0](torch.randn(1, T, D, dtype=torch.float64), place(positions)[0], seen)
    attention = replace(ARMS[name], aggregation_blocks=None)
    expected = explicit_because(ModelConfig(positions=positions, attention=attention))
    assert type(seen.attended[1].weights) is (FusedSoftmax if expected is None else Explicit)


@pytest.mark.parametrize("positions", PLACES)
@pytest.mark.parametrize("name", NORMALISERS | AROUND | TOGETHER)
def test_an_observer_is_shown_the_weights_that_made_the_output(name, positions):
    """Rows, their sums and the sums of their squares, from the values and the outputs alone where weights are free."""
    kind, shown = ARMS[name], Seen()
    module, _ = build(replace(kind, gate="none", aggregation="plain", calibration=CalibrationConfig()))
    with torch.no_grad():
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        out = module(x, place(positions)[0], shown)
    seen = shown.attended[1]
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


#: Every normaliser in each form with row sums of another kind; α is small, so that clipped rows are nearly softmaxes.
ROW_KINDS = [
    AttentionConfig(normaliser=name, normalise_rows=normalised)
    for name, rows in ROWS.items()
    for normalised in ((False, True) if rows.normalised_sum is not None else (False,))
    if name != "softmax_clipped"
] + [AttentionConfig(normaliser="softmax_clipped", clip_alpha=0.1, clip_zeta=zeta) for zeta in (None, 1.1)]


@pytest.mark.parametrize(
    "kind", ROW_KINDS, ids=lambda kind: f"{kind.normaliser} {kind.normalise_rows} {kind.clip_zeta}"
)
def test_the_facts_about_a_normaliser_are_those_of_the_weights_that_it_makes(kind):
    """Calibration takes rows that never sum to more than 1, and no others."""
    module, config = build(kind)
    shown = Seen()
    with torch.no_grad():
        x = torch.randn(40, T, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        module(x, Placement(), shown)
    weights, rows = shown.attended[1].weights, config.attention.rows
    sums = weights.rows(0, T).abs().sum(-1)
    assert (kind.row_sum == "one") == bool(((sums - 1).abs() * (sums > 0) < 1e-6).all())  # ReLUs may be all zeros
    assert (kind.row_sum != "any") == bool((sums < 1 + 1e-6).all())
    if kind.row_sum == "any":
        with pytest.raises(UsageError, match="calibrated needs rows of weights that sum to 1 at most"):
            replace(config, attention=replace(kind, aggregation="calibrated"))
    else:
        replace(config, attention=replace(kind, aggregation="calibrated"))
    assert rows.fused == (type(weights) is not Explicit)
    assert rows.is_softmax == (type(weights) is FusedSoftmax)
    assert rows.adds_key == bool(rows.fused and getattr(weights, "extra", []))
    # Weights of a pair of heads change with the scores of either.
    with torch.no_grad():
        module.q.weight[: config.d_head] *= 2
        module(x, Placement(), other := Seen())
    assert rows.pairs_heads == (not torch.equal(weights.rows(0, T)[:, 1], other.attended[1].weights.rows(0, T)[:, 1]))


def test_a_gradient_through_the_exact_factor_is_another_gradient():
    """Else the comparison with the definition would hold with the knob ignored on both sides."""
    gradients = []
    for name in (EXACT, EXACT.replace("True", "False")):
        module, _ = build(ARMS[name])
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        module(x, Placement()).square().sum().backward()
        gradients.append(module.q.weight.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 0.01 * gradients[0].abs().max()


@pytest.mark.parametrize("blocks", [[1], [0, 2], [], None])
@pytest.mark.parametrize("name", ["headnorm", EXACT])
def test_an_aggregation_applies_to_the_blocks_named_and_no_others(name, blocks):
    kind = replace(AGGREGATIONS[name], aggregation_blocks=blocks)
    config = ModelConfig(d_model=D, n_heads=H, n_layers=3, vocab_size=50, max_seq_len=32, attention=kind)
    model = born(config, 0).double()
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            parameters = dict(block.attn.named_parameters())
            chosen = kind if blocks is None or i in blocks else AttentionConfig()
            expected = slow_attention(parameters, x, replace(config, attention=chosen))
            torch.testing.assert_close(block.attn(x, Placement()), expected)
            assert ("aggregate.gain" in parameters) == (chosen.aggregation == "headnorm")


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_bf16_autocast_stays_near_float32(name):
    """What training runs in. Two sides of one module; errors are a few bf16 roundings (4e-3 each)."""
    module = build(AGGREGATIONS[name])[0].float()
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
        turns = torch.polar(torch.ones(()).double(), angles).to(complex_dtype)
        pairs = torch.complex(real, imaginary).to(complex_dtype) * turns
        return torch.cat([pairs.real, pairs.imag, x_TK[:, n_turned:].to(pairs.real.dtype)], dim=1)

    truth = turned(q_TK, torch.complex128) @ turned(k_TK, torch.complex128).T

    def error(q, k):
        assert q.dtype == k.dtype == torch.bfloat16
        return (q.double() @ k.double().T - truth).square().mean().sqrt()

    in_float32 = error(*(turned(x, torch.complex64).bfloat16() for x in (q_TK, k_TK)))
    rotation = RotaryPositions(config).place(256, torch.device("cpu")).rotation
    ours = error(*(rotate(x[None, None], rotation)[0, 0] for x in (q_TK, k_TK)))
    assert ours <= 1.001 * in_float32
