"""Fused attention with its log-sum-exp against explicit T×T matrices, forward and backward."""

import math
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from birthmark.models.attention.fused import blockwise as blocks
from birthmark.models.attention.fused import kernels, native
from birthmark.models.attention.normalisers import FusedSoftmax
from birthmark.models.attention.positions import Placement
from birthmark.models.attention.scores import Scores

# Both paths: fused CPU kernels, and what other devices take.
#: Where attention is computed, and the widest type that its kernels there have.
DEVICES = [("cpu", torch.float64), pytest.param("cuda", torch.float32, marks=pytest.mark.cuda)]


def make(shape, seed=0, dtype=torch.float64, device="cpu", spread=1.0, of_values=None):
    """q, k, v, and random upstream gradients of out and lse; values as wide as queries, or of so many channels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape] * 2 + [(*shape[:3], of_values or shape[3])] * 2
    q, k, v, d_out = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    d_lse = torch.randn(shape[:3], generator=generator, dtype=torch.float64)
    values = [(q * spread).to(dtype), (k * spread).to(dtype), v.to(dtype), d_out.to(dtype), d_lse]
    return [x.to(device) for x in values]


def explicit(q, k, v, scale):
    """Out, lse and weights from the whole matrix, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    n = q.shape[2]
    seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = torch.where(seen, torch.einsum("bhtk,bhsk->bhts", q, k) * scale, -torch.inf)
    lse = scores.exp().sum(-1).log()
    weights = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    return weights @ v, lse, weights


def effective_tokens(q, k, scale, asked_before=True):
    """As calibration asks for them, and as an observer does, after the output was made."""
    scores = Scores(q, k, scale, Placement())
    weighted = FusedSoftmax(scores, torch.zeros_like(k), [], needs_weights=True, needs_squares=asked_before)
    return 1 / weighted.sum_squares()


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def relative(a, b):
    """Largest error over the largest value."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


SHAPES = [(2, 3, 1, 8), (1, 2, 2, 4), (2, 3, 7, 5), (1, 2, 33, 16), (1, 1, 130, 12), (1, 2, 261, 64), (1, 1, 600, 8)]


@pytest.mark.parametrize(("device", "dtype"), [*DEVICES, ("cpu", torch.float32)])
@pytest.mark.parametrize(("shape", "of_values"), [*product(SHAPES, [None]), ((1, 2, 33, 16), 32), ((1, 2, 40, 16), 4)])
def test_outputs_and_gradients_equal_the_explicit_matrix(shape, of_values, dtype, device):
    # Float32 has 6e-8 a rounding; scores, exponentials and sums of up to 600 terms add up a few dozen of them.
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    q, k, v, d_out, d_lse = make(shape, dtype=dtype, device=device, of_values=of_values)
    scale = shape[-1] ** -0.5
    ours, reference = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    out, lse = kernels.attention_with_lse(*ours, scale)
    expected_out, expected_lse, _ = explicit(*reference, scale)
    # Without a fused kernel torch would make the whole matrix, whose numbers are as good.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert relative(kernels.causal_attention(*ours, scale), expected_out) < tolerance
    assert out.dtype == dtype
    assert lse.dtype == dtype
    assert relative(out, expected_out) < tolerance
    assert relative(lse, expected_lse) < tolerance
    # Gradients through both at once, and through either alone.
    for a, b in ((1, 1), (1, 0), (0, 1)):
        loss = a * (out * d_out).sum() + b * (lse * d_lse.to(lse.dtype)).sum()
        expected = a * (expected_out * d_out.double()).sum() + b * (expected_lse * d_lse).sum()
        got = torch.autograd.grad(loss, ours, retain_graph=True)
        wanted = torch.autograd.grad(expected, reference, retain_graph=True, allow_unused=True)
        # One token's softmax is constant: its score gradients are 0, ours up to rounding.
        size = max(float(w.abs().max()) for w in wanted if w is not None)
        for g, w in zip(got, wanted, strict=True):
            assert g.dtype == dtype
            assert float((g.double() - (0 if w is None else w)).abs().max()) < 10 * tolerance * size


@pytest.mark.parametrize(("length", "spread"), [*((n, 1.0) for n in (1, 5, 64, 200)), (40, 0.0), (40, 0.1), (40, 3.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 3e-5)])
def test_effective_tokens_are_one_over_the_sum_of_squared_weights(length, spread, dtype, tolerance):
    q, k, v, _, d_lse = make((2, 2, length, 8), seed=length, dtype=dtype, spread=spread)
    scale = 8**-0.5
    ours, reference = leaves(q, k), leaves(q.double(), k.double())
    n_eff = effective_tokens(*ours, scale)
    expected = 1 / explicit(*reference, v, scale)[2].square().sum(-1)
    # n_eff of the first token is 1 whatever happens, so errors are taken row by row.
    assert float(((n_eff.double() - expected) / expected).detach().abs().max()) < tolerance
    got = torch.autograd.grad((n_eff * d_lse.to(dtype)).sum(), ours)
    wanted = torch.autograd.grad((expected * d_lse).sum(), reference)
    for g, w in zip(got, wanted, strict=True):
        assert float((g.double() - w).abs().max()) < 3 * tolerance * max(1.0, float(w.abs().max()))


@pytest.mark.parametrize("asked_before", [True, False])
def test_effective_tokens_of_bf16_are_computed_in_float32(asked_before):
    """Facts: the same formula in bf16 is off by 5–73 %. Against the explicit matrix of the same rounded values."""
    q, k, v, _, d_lse = make((2, 4, 128, 32), dtype=torch.bfloat16)
    scale = 32**-0.5
    ours, reference = leaves(q, k), leaves(q.double(), k.double())
    expected = 1 / explicit(*reference, v, scale)[2].square().sum(-1)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            n_eff = effective_tokens(*ours, scale, asked_before)
        assert n_eff.dtype == torch.float32
        assert float(((n_eff.double() - expected) / expected).detach().abs().max()) < 1e-5
    got = torch.autograd.grad((n_eff * d_lse.float()).sum(), ours)
    wanted = torch.autograd.grad((expected * d_lse).sum(), reference)
    for g, w in zip(got, wanted, strict=True):
        # Each of the two log-sum-exps rounds its weights, its score gradients and its sum to bf16 (4e-3 each).
        assert relative(g, w) < 1.5e-2


def test_scores_of_hundreds_overflow_nothing():
    q, k, v, d_out, d_lse = make((1, 1, 20, 8), dtype=torch.float32, spread=20.0)
    ours = leaves(q, k, v)
    out, lse = kernels.attention_with_lse(*ours, 1.0)
    assert lse.abs().max() > 500
    assert relative(out, torch.softmax((q.double() @ k.double().mT).masked_fill(
        torch.ones(20, 20).triu(1) > 0, -torch.inf), -1) @ v.double()) < 1e-3  # fmt: skip
    for g in torch.autograd.grad((out * d_out).sum() + (lse * d_lse.float()).sum(), ours):
        assert bool(g.isfinite().all())


def test_views_of_other_strides_give_the_same_numbers():
    """Attention hands over transposed views, repeated keys and slices, never fresh tensors."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2, 9, 3, 24, generator=generator, dtype=torch.float64).requires_grad_()
    q, k, v = base.transpose(1, 2).chunk(3, dim=-1)
    fresh = leaves(q.contiguous(), k.contiguous(), v.contiguous())
    weights = torch.randn(2, 3, 9, 8, generator=generator, dtype=torch.float64)
    results = []
    for tensors in ((q, k, v), fresh):
        out, lse = kernels.attention_with_lse(*tensors, 0.3)
        results.append(((out * weights).sum() + (lse * weights[..., 0]).sum(), out, lse))
    torch.testing.assert_close(results[0][1:], results[1][1:])
    (got,) = torch.autograd.grad(results[0][0], base)
    wanted = torch.cat(torch.autograd.grad(results[1][0], fresh), dim=-1).transpose(1, 2)
    torch.testing.assert_close(got, wanted)


#: Every pair of a window, a prefix and a length.
PAIRS = product(enumerate((None, 1, 2, 6, 12, 13, 100)), enumerate((None, 1, 5, 61, None)))
SIGHTS = [(window, prefix, (1, 7, 12, 61, 300)[(i + j) % 5]) for (i, window), (j, prefix) in PAIRS]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("window", "prefix", "length"), SIGHTS)
def test_windows_and_prefixes_equal_the_explicit_matrix(window, prefix, length, device, dtype):
    # What the device is given is compared with the matrix in its own type.
    q, k, v, d_out, d_lse = make((2, 3, length, 5), seed=length, dtype=dtype, device=device)
    d_lse = d_lse.to(dtype)
    ours, reference = leaves(q, k, v), leaves(q, k, v)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = (key <= query) & (key > query - (window or length)) | (torch.maximum(query, key) < (prefix or 0))
    scores = torch.einsum("bhtk,bhsk->bhts", *reference[:2]) * 0.4
    weights = scores.masked_fill(~seen.to(device), -torch.inf).softmax(-1)
    expected_out = weights @ reference[2]
    expected_lse = scores.masked_fill(~seen.to(device), -torch.inf).logsumexp(-1)
    out, lse = kernels.visible_attention(*ours, 0.4, window, prefix)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    alone = kernels.visible_lse(*ours[:2], 0.4, window, prefix)
    torch.testing.assert_close(alone, expected_lse)
    torch.testing.assert_close(
        *(torch.autograd.grad((lse * d_lse).sum(), qk[:2], retain_graph=True)
          for lse, qk in ((alone, ours), (expected_lse, reference)))
    )  # fmt: skip
    got = torch.autograd.grad((out * d_out).sum() + (lse * d_lse).sum(), ours)
    wanted = torch.autograd.grad((expected_out * d_out).sum() + (expected_lse * d_lse).sum(), reference)
    torch.testing.assert_close(got, wanted)


def test_a_long_window_reads_no_more_memory_than_chunks(monkeypatch):
    """Windows are made of causal attentions over chunks, so nothing longer than the window is ever attended to."""
    lengths = []
    whole = kernels.attention_with_lse
    monkeypatch.setattr(kernels, "attention_with_lse", lambda q, *rest: lengths.append(q.shape[2]) or whole(q, *rest))
    q, k, v = make((1, 1, 100, 4))[:3]
    kernels.visible_attention(q, k, v, 0.5, window=16)
    assert lengths == [16, 15]


@pytest.fixture(params=["native", "kept weights", "weights computed again"])
def bf16_path(request, monkeypatch):
    """Each way of bf16 attention on a CPU: the kernel of our own, and blocks of torch's products."""
    if request.param == "native":
        if why := native.why_not():
            pytest.skip(f"the kernel in C does not run here: {why}")
        return
    monkeypatch.setattr(native, "is_built", lambda: False)
    monkeypatch.setattr(blocks, "_KEPT", 1 << 30 if request.param == "kept weights" else -1)


@pytest.mark.parametrize(
    ("shape", "of_values"),
    [
        *((shape, None) for shape in [(2, 3, 1, 8), (1, 2, 33, 16), (1, 2, 128, 8), (2, 2, 129, 64), (1, 1, 300, 8)]),
        *(((1, 2, 150, 16), 32), ((1, 2, 70, 20), 7), ((1, 1, 65, 3), 80)),
    ],
)
def test_bf16_attention_equals_the_explicit_matrix(shape, of_values, bf16_path):
    """What bf16 training on CPU runs on; the output alone, and with the log-sum-exp."""
    q, k, v, d_out, d_lse = make(shape, seed=3, dtype=torch.bfloat16, of_values=of_values)
    scale = shape[-1] ** -0.5
    ours, reference = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    expected_out, expected_lse, _ = explicit(*reference, scale)
    out, lse = kernels.attention_with_lse(*ours, scale)
    alone = kernels.causal_attention(*ours, scale)
    assert (out.dtype, alone.dtype, lse.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert relative(out, expected_out) < 8e-3
    assert relative(alone, expected_out) < 8e-3
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    for got, of_out, of_lse in ((out, 1, 1), (alone, 1, 0), (out, 0, 1)):
        loss = expected = torch.zeros(())
        if of_out:
            loss, expected = (got.float() * d_out.float()).sum(), (expected_out * d_out.double()).sum()
        if of_lse:
            loss, expected = loss + (lse * d_lse.float()).sum(), expected + (expected_lse * d_lse).sum()
        gradients = torch.autograd.grad(loss, ours, retain_graph=True)
        wanted = torch.autograd.grad(expected, reference, retain_graph=True, allow_unused=True)
        size = max(float(w.abs().max()) for w in wanted if w is not None)
        for g, w in zip(gradients, wanted, strict=True):
            assert float((g.double() - (0 if w is None else w)).abs().max()) < 3e-2 * size


def test_the_backward_pass_of_bf16_blocks_fills_no_tensor_as_large_as_the_weights_that_it_kept(monkeypatch):
    """autograd makes zeros of what no gradient comes for, unless it is asked not to."""
    monkeypatch.setattr(native, "is_built", lambda: False)
    q, k, v, d_out, _ = make((1, 2, 300, 8), dtype=torch.bfloat16)
    ours = leaves(q, k, v)
    out = kernels.causal_attention(*ours, 0.3)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        torch.autograd.grad(out, ours, d_out)
    fills = [event for event in seen.events() if event.name in ("aten::fill_", "aten::zero_")]
    lower_triangles = 2 * 300 * 301 // 2
    assert 0 < max(math.prod(event.input_shapes[0]) for event in fills) < lower_triangles


def test_bf16_attention_has_the_same_gradients_under_activation_checkpointing(bf16_path):
    q, k, v, d_out, _ = make((1, 2, 150, 16), dtype=torch.bfloat16)
    plain, checkpointed = leaves(q, k, v), leaves(q, k, v)
    out = kernels.causal_attention(*plain, 0.25)
    again = checkpoint(kernels.causal_attention, *checkpointed, 0.25, use_reentrant=False)
    gradients = torch.autograd.grad(again, checkpointed, d_out), torch.autograd.grad(out, plain, d_out)
    assert all(map(torch.equal, *gradients))


def test_an_autocast_around_bf16_attention_keeps_its_scores_float32(bf16_path):
    q, k, v, _, _ = make((1, 2, 150, 32), dtype=torch.bfloat16, spread=3.0)
    expected = explicit(q, k, v, 0.3)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = kernels.attention_with_lse(q, k, v, 0.3)
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)


def with_a_sink(strength, n=4, length=192, width=64):
    """bf16 q, k, v and upstream gradients, where all queries point along one key by so much."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, n, length, width, generator=generator, dtype=torch.float64) for _ in range(4))
    q[..., 0], k[:, :, 0], k[:, :, 0, 0] = 4, 0, strength
    return [x.bfloat16() for x in (q, k, v, d_out)]


@pytest.mark.parametrize(("strength", "mass"), [(7.0, 0.23), (15.0, 0.91), (20.0, 0.99)])
def test_bf16_gradients_at_a_sink_are_as_good_as_without_one(strength, mass, bf16_path):
    """Where one key takes the row, dp and Δ are almost equal: the fused kernel's error grows with the mass, ours must
    not. Below, both are a few roundings of bf16: of weights and of score gradients here."""
    q, k, v, d_out = with_a_sink(strength)
    scale, d_squares = 64**-0.5, torch.linspace(-2, 2, 192)
    reference = leaves(q.double(), k.double(), v.double())
    out, _, weights = explicit(*reference, scale)
    assert float(weights[:, :, 1:, 0].detach().mean()) == pytest.approx(mass, abs=0.02)

    def error(loss, ours, expected):
        got = torch.autograd.grad(loss, ours, retain_graph=True)
        wanted = torch.autograd.grad(expected, reference[: len(ours)], retain_graph=True)
        return [float((g.double() - w).norm() / w.norm()) for g, w in zip(got, wanted, strict=True)]

    expected = (out * d_out.double()).sum()
    theirs = leaves(q, k, v)
    fused = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
    fused_error = error((fused.float() * d_out.float()).sum(), theirs, expected)
    for wants_sums in (False, True):
        ours = leaves(q, k, v)
        got, _, squares = kernels.causal_bf16(*ours, scale, wants_sums)
        errors = error((got.float() * d_out.float()).sum(), ours, expected)
        assert max(errors) < 5e-3
        assert all(e < (1.15 if mass < 0.5 else 0.5 if i < 2 else 1) * f
                   for i, (e, f) in enumerate(zip(errors, fused_error, strict=True)))  # fmt: skip
    of_squares = (weights.square().sum(-1) * d_squares).sum()
    assert max(error((squares * d_squares).sum(), ours[:2], of_squares)) < 8e-3


def test_bf16_attention_reads_shared_keys_and_values_from_one_place(bf16_path):
    """As if each query head had a copy of its own; their gradients are summed before they are rounded."""
    q, _, _, d_out, d_lse = make((2, 6, 150, 16), dtype=torch.bfloat16)
    k, v = (x.bfloat16() for x in torch.randn(2, 2, 2, 150, 16, generator=torch.Generator().manual_seed(1)))
    ours, copied = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    out, lse, squares = kernels.causal_bf16(*ours, 0.25, wants_sums=True)
    wide = explicit(copied[0], *(x.repeat_interleave(3, dim=1) for x in copied[1:]), 0.25)
    assert relative(out, wide[0]) < 8e-3
    torch.testing.assert_close(lse.double(), wide[1], atol=1e-5, rtol=1e-5)
    d_squares = torch.linspace(-2, 2, 150)
    loss = (out.float() * d_out.float()).sum() + (lse * d_lse.float()).sum() + (squares * d_squares).sum()
    expected = (wide[0] * d_out.double()).sum() + (wide[1] * d_lse).sum()
    expected = expected + (wide[2].square().sum(-1) * d_squares).sum()
    for g, w in zip(torch.autograd.grad(loss, ours), torch.autograd.grad(expected, copied), strict=True):
        assert g.shape == w.shape
        assert relative(g, w) < 2e-2
