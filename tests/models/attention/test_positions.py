"""ALiBi's slopes against the paper's own code, T5's buckets against transformers', rotary positions against complex
numbers in float64 and autograd.
"""

import math

import pytest
import torch
from oracles import Traffic
from triton_kernels import DEVICES, interpret

from birthmark import kernel_devices
from birthmark.models.attention import rotation as rotation_module
from birthmark.models.attention.fused import native
from birthmark.models.attention.positions import AlibiPositions, T5Positions
from birthmark.models.attention.rotation import rotate, rotate_and_multiply, turned, turning
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


def test_a_gpu_reads_and_writes_each_channel_once_in_any_pass_that_is_not_compiled(monkeypatch):
    """float64, for which there is no kernel, takes the formula."""
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    rotation = turning(angles_of(K // 2, True)).to("meta")
    for dtype, gradients in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float64, True)):
        x = heads(dtype, 0).to("meta").requires_grad_(gradients)
        with Traffic() as traffic:
            y = rotate(x, rotation)
        assert y.stride() == x.stride()
        by_kernel = {"birthmark::turn_in_triton": 2 * x.nbytes + rotation.nbytes // 2}
        assert (dict(traffic.bytes) == by_kernel) is (dtype == torch.bfloat16)
        if gradients:
            with Traffic() as traffic:
                (dx,) = torch.autograd.grad(y, x, torch.empty(y.shape, dtype=dtype, device="meta"))
            assert dtype == torch.float64 or (dx.stride(), dict(traffic.bytes)) == (x.stride(), by_kernel)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_pairs", "width"), [(K // 2, K), (4, K), (64, 128), (37, 80)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_gpus_kernel_has_the_bits_of_the_formula(device, dtype, n_pairs, width, per_sequence, monkeypatch):
    if device == "cpu":
        # Two positions to a program, so that the last one holds one of seven.
        interpret(monkeypatch, rotation_module, _CHANNELS=64)
    rotation = turning(angles_of(n_pairs, per_sequence)).to(device)
    x, d = (heads(dtype, seed, width).to(device) for seed in (0, 1))
    y = rotate(x.requires_grad_(), rotation)
    (dx,) = torch.autograd.grad(y, x, d)
    assert y.stride() == dx.stride() == x.stride()
    wide = x.detach().float().requires_grad_()
    plain = turned(wide, rotation)
    for found, wanted in ((y, plain), (dx, *torch.autograd.grad(plain, wide, d.float()))):
        if device == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts float32 off, where a card rounds
            wanted = (wanted.detach().view(torch.int32) & ~0xFFFF).view(torch.float32)
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_pairs", "width"), [(K // 2, K), (4, K), (37, 80)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_gpus_kernel_multiplies_turned_heads_and_adds_to_gradients(
    device, dtype, n_pairs, width, per_sequence, monkeypatch
):
    """Results have the bits of the rotation alone; gradients are those of the formula in float64, each rounded once."""
    if device == "cpu":
        interpret(monkeypatch, rotation_module, _CHANNELS=64)
    rotation = turning(angles_of(n_pairs, per_sequence)).to(device)
    x, d = (heads(dtype, seed, width).to(device) for seed in (0, 1))
    v, d_by_v = (
        torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)
        for shape in ((H, 3, width), (B, H, T, 3))
    )
    leaves = [x.requires_grad_(), v.requires_grad_()]
    y, by_v = rotate_and_multiply(x, rotation, v)
    assert torch.equal(y, rotate(x.detach(), rotation))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    turned_exactly = turned(exact[0], rotation.double())
    wanted = turned_exactly, turned_exactly @ exact[1].mT
    # The products are those of heads as they were rounded.
    off = by_v.detach().double() - y.detach().double() @ v.detach().double().mT
    assert float(off.abs().max()) <= 3e-6 * float(by_v.detach().abs().max())
    error = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for chosen in ([0], [1], [0, 1]):
        upstream = [(d, d_by_v)[i] for i in chosen]
        got = torch.autograd.grad(
            [(y, by_v)[i] for i in chosen], leaves, upstream, retain_graph=True, allow_unused=True
        )
        due = torch.autograd.grad(
            [wanted[i] for i in chosen], exact, [u.double() for u in upstream], retain_graph=True, allow_unused=True
        )
        assert got[0].stride() == x.stride()
        assert (got[1] is None) == (due[1] is None) == (chosen == [0])
        for one, other in zip(got, due, strict=True):
            assert one is None or float((one.double() - other).abs().max()) <= error * float(other.abs().max())
