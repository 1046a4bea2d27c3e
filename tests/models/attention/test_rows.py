"""Sums over rows of heads and their gradients: against the formulas in float64, by torch's operators and by kernels
under Triton's interpreter or on a GPU.

Triton decides as it is imported whether it interprets: run this file alone, with ``TRITON_INTERPRET=1``.
"""

from importlib import import_module

import pytest
import torch
from triton_kernels import interpreted

from birthmark import kernel_devices
from birthmark.models.attention.fused import rows
from birthmark.models.attention.fused.rows import products, scaled, sums_of_gradient, with_vectors

B, H, T = 2, 3, 41
#: Relative error of the largest number: float32 sums, and one rounding to the type of the rows.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(params=[
    "operators",
    pytest.param("interpreter", marks=interpreted),
    pytest.param("cuda", marks=pytest.mark.cuda),
])  # fmt: skip
def device(request, monkeypatch):
    if request.param == "interpreter":
        monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
        # Several blocks to a head, the last cut short.
        monkeypatch.setattr(import_module(rows.__name__ + "_kernel"), "_TILE", 256)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(params=[(torch.float32, 12), (torch.bfloat16, 16), (torch.float16, 40)], ids=str)
def given(request, device):
    """Two tensors of rows, the heads of a position side by side as projections leave them; numbers and vectors."""
    dtype, width = request.param
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    x, d = (drawn(B, T, H, width).to(device, dtype).transpose(1, 2) for _ in range(2))
    return x, d, drawn(B, H, T).to(device), drawn(B, H, T, 3).to(device), drawn(H, 3, width).to(device)


def assert_near(found, wanted, dtype):
    wanted = wanted.to(found.device)
    assert float((found.double() - wanted).abs().max()) <= TOLERANCES[dtype] * float(wanted.abs().max())


def with_gradients(function, leaves, upstream):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))


def test_rows_times_factors(given):
    x, d, a, *_ = given
    found = with_gradients(scaled, (x, a), d)
    wanted = with_gradients(lambda x, a: x * a[..., None], (x.double(), a.double()), d)
    for one, exact, dtype in zip(found, wanted, (x.dtype, x.dtype, x.dtype), strict=True):
        assert_near(one, exact, dtype)
    assert found[0].stride() == found[1].stride() == x.stride()
    position_T = torch.arange(1, T + 1, device=x.device) / T  # without a gradient, for all heads
    y, dx = with_gradients(lambda x: scaled(x, position_T), (x,), d)
    assert_near(y, x.double() * position_T[:, None], x.dtype)
    assert_near(dx, d.double() * position_T[:, None], x.dtype)


def test_products_with_vectors(given):
    x, _, _, b, v = given
    found = with_gradients(lambda x, v: products(x, v)[1], (x, v), b)
    wanted = with_gradients(lambda x, v: x @ v.mT, (x.double(), v.double()), b)
    for one, exact, dtype in zip(found, wanted, (torch.float32, x.dtype, torch.float32), strict=True):
        assert_near(one, exact, dtype)
    assert found[0].dtype == found[2].dtype == torch.float32


@pytest.mark.parametrize("which", ["both", "rows"])
def test_rows_behind_their_products_pass_their_gradient_on(given, which):
    """The gradient that comes by another way lies differently, as that of a fused attention does."""
    x, d, _, b, v = given
    leaves = [x.detach().requires_grad_(), v.detach().requires_grad_()]
    same, by_v = products(*leaves)
    assert torch.equal(same, x)
    grads = [d.contiguous(), b.to(by_v.dtype)] if which == "both" else [d.contiguous()]
    dx, dv = torch.autograd.grad([same, by_v][: len(grads)], leaves, grads, allow_unused=True)
    added = b.double() @ v.double() if which == "both" else 0
    assert_near(dx, d.double() + added, x.dtype)
    if which == "both":
        assert_near(dv, torch.einsum("bhtn,bhtk->hnk", b.double(), x.double()), torch.float32)
        assert dx.stride() == x.stride() or not kernel_devices.fuses_rows(x)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_vectors_are_added_to_rows_and_gradients_summed(given, n):
    """As attention needs it, without an autograd graph. In 16 bits torch's operators round each term."""
    x, d, a, b, v = given
    b, v = b[..., : n or 1], v[:, :n] if n else None
    exact = x.double() * a.double()[..., None] + (b.double() @ v.double() if n else 0)
    assert_near(with_vectors(x, a, b, v), exact, x.dtype)
    sums = sums_of_gradient(d, x, b, v)
    loose = torch.float32 if x.dtype == torch.float32 or kernel_devices.fuses_rows(x) else torch.bfloat16
    assert_near(sums.by_o_BHT, (d.double() * x.double()).sum(-1), loose)
    if n == 0:
        assert sums[1:] == (None, None)
        return
    assert_near(sums.by_v_BHTN, d.double() @ v.double().mT, loose)
    assert_near(sums.v_HNK, torch.einsum("bhtn,bhtk->hnk", b.double(), d.double()), loose)


def test_many_vectors_and_float64_go_to_torchs_operators(monkeypatch):
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    monkeypatch.setattr(rows, "_reduced", lambda *_: pytest.fail("the kernel runs"))
    x, v = torch.randn(1, 2, 5, 8), torch.randn(2, 17, 8)
    assert torch.equal(products(x, v)[1], x @ v.mT)
    assert products(x.double(), v[:, :1])[1].dtype == torch.float64
