"""Activations, products with them and their gradients: against formulas in float64. SwiGLU's product on a GPU runs
there, or under Triton's interpreter.

Triton decides as it is imported whether it interprets: run this file alone, with ``TRITON_INTERPRET=1``.
"""

from importlib import import_module

import pytest
import torch
from oracles import Traffic
from triton_kernels import DEVICES

from birthmark import kernel_devices
from birthmark.models import activations
from birthmark.models.activations import activated


def drawn(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    gate, up, d = (torch.randn(2, 7, 40, generator=generator) for _ in range(3))
    gate[0, 0, :4] = torch.tensor([-200.0, 200.0, -20.0, 0.0])  # its exponential overflows, or is lost beside 1
    return [x.to(device, dtype) for x in (gate, up, d)]


def product_and_gradients(gate, up, d):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = activated("silu", gate, up)
    return y.detach(), *torch.autograd.grad(y, (gate, up), d)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_the_kernels_are_the_formula(device, dtype, error, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
        monkeypatch.setattr(
            import_module("birthmark.models.gated_kernel"), "_BLOCK", 256
        )  # the last of three cut short
    given = drawn(dtype, device)
    gate, up, d = (x.double() for x in given)
    share = gate.sigmoid()
    wanted = gate * share * up, d * up * share * (1 + gate * (1 - share)), d * gate * share
    for found, exact in zip(product_and_gradients(*given), wanted, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=error, atol=error)


def test_kernels_move_eight_tensors_where_separate_operators_move_fourteen(monkeypatch):
    given = [x.to("meta") for x in drawn(torch.bfloat16)]
    moved = {}
    for kind, looks_up in (("cpu", False), ("cpu", True), ("cuda", False)):
        monkeypatch.setattr(kernel_devices, "chosen_for", kind)
        monkeypatch.setattr(activations, "_is_built", lambda looks_up=looks_up: looks_up)
        with Traffic() as traffic:
            product_and_gradients(*given)
        moved[kind, looks_up] = traffic.bytes.total() / given[0].nbytes
    assert moved == {("cpu", False): 14, ("cpu", True): 8, ("cuda", False): 8}


FORMULAS = {
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
}


@pytest.mark.skipif(not activations._is_built(), reason="needs a CPU with AVX-512 BF16 and a C compiler")
@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_cpu_rounds_once_at_every_number(name, multiplied):
    """All numbers that bf16 has, infinities and NaN among them; more than one block, in more than one thread."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(2, -1)
    generator = torch.Generator().manual_seed(0)
    factor, d = (torch.randn(x.shape, generator=generator).bfloat16() for _ in range(2))
    leaves = [y.detach().requires_grad_() for y in ([x, factor] if multiplied else [x])]
    y = activated(name, *leaves)
    found = y.detach(), *torch.autograd.grad(y, leaves, d)
    wide = [y.detach().double().requires_grad_() for y in leaves]
    exact = FORMULAS[name](wide[0]) * wide[1] if multiplied else FORMULAS[name](wide[0])
    finite = x.isfinite() & (x.abs() < 1e30)  # beyond, the formulas' own gradients overflow
    for one, other in zip(found, (exact.detach(), *torch.autograd.grad(exact, wide, d.double())), strict=True):
        assert one.dtype == torch.bfloat16
        # Half of bf16's last digit.
        torch.testing.assert_close(one[finite].double(), other[finite], rtol=2**-8 * 1.001, atol=1e-15)
    # All are x there, whose products with the factor lie halfway between two numbers now and then.
    if multiplied and name != "tanh":
        far = finite & (x > 20)
        assert torch.equal(found[0][far], (x.float() * factor.float()).bfloat16()[far])
    limits = torch.tensor([torch.inf, torch.nan], dtype=torch.bfloat16)
    torch.testing.assert_close(
        activated(name, limits).double(), FORMULAS[name](limits.double()), equal_nan=True, rtol=0, atol=0
    )
