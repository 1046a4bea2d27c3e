"""Sums over rows of heads and their gradients: against the formulas in float64, by torch's operators and by kernels
under Triton's interpreter or on a GPU.

Triton decides as it is imported whether it interprets: run this file alone, with ``TRITON_INTERPRET=1``.
"""

import pytest
import torch
from triton_kernels import WAYS, interpret

from birthmark import kernel_devices
from birthmark.models.attention.fused import rows
from birthmark.models.attention.fused.rows import beside, gradients_beside, products, scaled

B, H, T = 2, 3, 41
#: Relative error of the largest number: float32 sums, and one rounding to the type of the rows.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(params=WAYS)
def device(request, monkeypatch):
    if request.param == "interpreter":
        # Several blocks to a head, the last cut short.
        interpret(monkeypatch, rows, _TILE=256)
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


def assert_near(found, wanted, dtype, n_rounded=1):
    wanted = wanted.to(found.device)
    tolerance = n_rounded * TOLERANCES[dtype]
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


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


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("brought", [False, True], ids=["no value", "values"])
def test_an_output_is_set_beside_further_keys(given, n, brought):
    """As attention needs it, without an autograd graph: against the softmax over all keys, whose graph is torch's."""
    x, d, lse, others, v = given
    others, v = 2 * others[..., :n], v[:, :n] if brought else None
    leaves = [y.detach().double().requires_grad_() for y in (others, *([v] if brought else []))]
    total = torch.cat([lse.double()[..., None], leaves[0]], dim=-1).logsumexp(-1)
    out = x.double() * (lse.double() - total).exp()[..., None]
    if brought:
        out = out + (leaves[0] - total[..., None]).exp() @ leaves[1]
    found, found_total = beside(x, lse, others, v)
    assert found.dtype == x.dtype
    assert found.stride() == x.stride()
    assert_near(found, out.detach(), x.dtype)
    assert_near(found_total, total.detach(), torch.float32)

    d_total = torch.randn(total.shape, generator=torch.Generator().manual_seed(1)).to(d.device)
    # In 16 bits torch's operators round each term of two sums.
    rounds = x.dtype != torch.float32 and not kernel_devices.fuses_rows(x)
    for of_total in (None, d_total):
        upstream = [d.double(), torch.zeros_like(total) if of_total is None else of_total.double()]
        wanted = torch.autograd.grad([out, total], leaves, upstream, retain_graph=True)
        if x.dtype != torch.float32:
            # A backward pass has the output as it was rounded: off by e, it changes a gradient by share · Σ d·e.
            share = (leaves[0] - total[..., None]).exp().detach()
            off = (d.double() * (found.double() - out.detach())).sum(-1)
            wanted = (wanted[0] - share * off[..., None], *wanted[1:])
        got = gradients_beside(d, found, found_total, of_total, others, v)
        assert (got[1] is not None) == brought
        for one, exact in zip(got, wanted, strict=False):
            assert_near(one, exact, torch.bfloat16 if rounds else torch.float32, 1 + rounds)
    alone, nothing = gradients_beside(None, found, found_total, d_total, others, v)
    assert nothing is None
    assert_near(alone, d_total[..., None] * (others - found_total[..., None]).exp(), torch.float32)


def test_many_vectors_and_float64_go_to_torchs_operators(monkeypatch):
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    monkeypatch.setattr(rows, "_reduced", lambda *_: pytest.fail("the kernel runs"))
    x, v = torch.randn(1, 2, 5, 8), torch.randn(2, 17, 8)
    assert torch.equal(products(x, v)[1], x @ v.mT)
    assert products(x.double(), v[:, :1])[1].dtype == torch.float64
