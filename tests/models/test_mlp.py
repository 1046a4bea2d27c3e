"""SwiGLU's product and its gradients: against the formula in float64, under Triton's interpreter or on a GPU.

Triton decides as it is imported whether it interprets: run this file alone, with ``TRITON_INTERPRET=1``.
"""

from importlib import import_module

import pytest
import torch
from oracles import Traffic
from triton_kernels import DEVICES

from birthmark.models import devices
from birthmark.models.mlp import gated


def drawn(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    gate, up, d = (torch.randn(2, 7, 40, generator=generator) for _ in range(3))
    gate[0, 0, :4] = torch.tensor([-200.0, 200.0, -20.0, 0.0])  # its exponential overflows, or is lost beside 1
    return [x.to(device, dtype) for x in (gate, up, d)]


def product_and_gradients(gate, up, d):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = gated("silu", gate, up)
    return y.detach(), *torch.autograd.grad(y, (gate, up), d)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_the_kernels_are_the_formula(device, dtype, error, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(devices, "chosen_for", "cuda")
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


def test_a_gpu_moves_eight_tensors_where_separate_operators_move_fourteen(monkeypatch):
    given = [x.to("meta") for x in drawn(torch.bfloat16)]
    moved = {}
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(devices, "chosen_for", kind)
        with Traffic() as traffic:
            product_and_gradients(*given)
        moved[kind] = traffic.bytes.total() / given[0].nbytes
    assert moved == {"cpu": 14, "cuda": 8}
