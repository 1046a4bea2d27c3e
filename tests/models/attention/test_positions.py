"""ALiBi's slopes against the paper's own code, T5's buckets against transformers', rotary positions against complex
numbers in float64 and autograd.
"""

import math

import pytest
import torch
from oracles import Operators

from birthmark.models.attention import rotation as rotation_module
from birthmark.models.attention.fused import native
from birthmark.models.attention.positions import AlibiPositions, T5Positions
from birthmark.models.attention.rotation import rotate, turned, turned_in_place, turning
from birthmark.models.config import ModelConfig


def papers_slopes(n):
    """``get_slopes`` of github.com/ofirpress/attention_with_linear_biases."""

    def of_power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return of_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_power_of_2(closest) + papers_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 20, 32, 71])
def test_alibis_slopes_are_the_papers(n_heads):
    config = ModelConfig(d_model=2 * n_heads, n_heads=n_heads, positions="alibi", vocab_size=24)
    slopes_H = AlibiPositions(config).place(5, torch.device("cpu")).slopes_H
    assert slopes_H.dtype == torch.float32
    torch.testing.assert_close(slopes_H.double(), torch.tensor(papers_slopes(n_heads)).double(), rtol=1e-6, atol=0)
    whole = 2 ** math.floor(math.log2(n_heads))
    steps = [8 / whole * i for i in range(1, whole + 1)] + [4 / whole * i for i in range(1, 2 * (n_heads - whole), 2)]
    assert torch.equal(slopes_H, torch.tensor([2.0**-step for step in steps]))


@pytest.mark.parametrize(("n_buckets", "longest"), [(32, 128), (8, 20), (2, 2)])
def test_t5_buckets_are_those_of_transformers(n_buckets, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    shape = {"d_model": 32, "n_heads": 4, "vocab_size": 61, "max_seq_len": 24}
    positions = T5Positions(ModelConfig(**shape, positions="t5", t5_buckets=n_buckets, t5_max_distance=longest))
    with torch.no_grad():
        positions.table.weight.copy_(torch.arange(n_buckets)[:, None].expand(-1, 4))
    bucket = T5Attention._relative_position_bucket(-torch.arange(300), False, n_buckets, longest)
    assert torch.equal(positions.place(300, torch.device("cpu")).bias_HS, bucket.float().expand(4, -1))
    late = positions.place(3, torch.device("cpu"), first=297)
    assert (late.first, late.bias_HS.shape) == (297, (4, 300))


# ---------------------------------------------------------------- rotary positions, forth and back

B, H, T, K = 2, 3, 7, 12


@pytest.fixture(params=["kernel", "torch"])
def written_by(request, monkeypatch):
    """Writers of bf16 results: the kernel in C, and torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(rotation_module, "_kernel_turns", lambda *_: False)
        return
    if why := native.why_not():
        pytest.skip(f"the kernel in C does not run here: {why}")
    kernel_turns = rotation_module._kernel_turns

    def turns_all_of_bf16(out, x, *tables):
        turns = kernel_turns(out, x, *tables)
        assert turns == (x.dtype == torch.bfloat16)
        return turns

    monkeypatch.setattr(rotation_module, "_kernel_turns", turns_all_of_bf16)


def angles_of(n_pairs, per_sequence):
    return torch.randn(*((B, 1) if per_sequence else ()), T, n_pairs, generator=torch.Generator().manual_seed(3))


def heads(dtype, seed, width=K):
    """As the map lays them out: heads of one position side by side."""
    x = torch.randn(B, T, H, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.transpose(1, 2)


def as_complex(x, angles, back=False):
    """A pair as one complex number, times that of its angle or its conjugate, in float64."""
    n = angles.shape[-1]
    turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), -angles.double() if back else angles.double())
    pairs = torch.complex(x[..., :n].double(), x[..., n : 2 * n].double()) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * n :].double()], dim=-1)


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("n_pairs", [K // 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients_are_turned_forth_and_back(dtype, n_pairs, per_sequence, written_by):
    angles, x, d = angles_of(n_pairs, per_sequence), heads(dtype, 0).requires_grad_(), heads(dtype, 1)
    y = rotate(x, turning(angles.double()).to(torch.promote_types(dtype, torch.float32)))
    (dx,) = torch.autograd.grad(y, x, d)
    assert y.dtype == dx.dtype == dtype
    # Two products and a sum in float32, then one rounding.
    error = {torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float64: 1e-15}[dtype]
    for found, given, back in ((y, x.detach(), False), (dx, d, True)):
        size = given.abs().max().double()
        assert (found.detach().double() - as_complex(given, angles, back)).abs().max() <= 1.5 * error * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_pairs", "width"), [(K // 2, K), (4, K), (32, 64), (37, 80)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_training_pass_has_the_bits_of_the_formula(dtype, n_pairs, width, per_sequence, written_by):
    """And the layouts that are read next."""
    rotation, x = turning(angles_of(n_pairs, per_sequence)), heads(dtype, 0, width).requires_grad_()
    d = heads(dtype, 1, width)
    with torch.no_grad():
        d[0, 0, 1, 0], d[0, 1, 2, :2] = torch.nan, torch.tensor([torch.inf, -torch.inf])
    y, plain = rotate(x, rotation), turned(x, rotation)
    (dx,), (dx_plain,) = (torch.autograd.grad(of, x, d) for of in (y, plain))
    assert torch.equal(y, plain)
    torch.testing.assert_close(dx, dx_plain, rtol=0, atol=0, equal_nan=True)
    assert y.is_contiguous()
    assert dx.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("n_pairs", [K // 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpu_without_gradients_writes_the_same_bits_with_fewer_copies(dtype, n_pairs, per_sequence):
    rotation = turning(angles_of(n_pairs, per_sequence).double()).to(torch.promote_types(dtype, torch.float32))
    x, names = heads(dtype, 0), []
    before, found = x.clone(), turned_in_place(x, rotation)
    assert torch.equal(x, before)
    assert torch.equal(found, turned(x, rotation))
    assert found.stride() == turned(x, rotation).stride()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), Operators(lambda function, *_: names.append(function.name())):
            rotate(x.to("meta"), rotation.to("meta"))
        assert ("aten::roll" in names) is gradients
