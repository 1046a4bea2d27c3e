"""RMSNorm of a training pass on a CPU: torch's values, the formula's gradients, and little kept for them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from birthmark.models.norms import rms_norm

EPS = 1e-5
#: Of one block of rows, of several and a rest, and of one channel.
SHAPES = [(2, 3, 64), (2, 700, 1000), (4, 5, 1)]


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, gain, dy = (torch.randn(size, generator=generator).to(dtype) for size in (shape, shape[-1:], shape))
    return x.requires_grad_(), gain.requires_grad_(), dy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_torchs_to_the_bit(shape, dtype):
    x, gain, _ = inputs(shape, dtype)
    trained = rms_norm(x, gain, EPS)
    assert trained.requires_grad
    assert torch.equal(trained, F.rms_norm(x, gain.shape, gain, EPS))
    with torch.no_grad():
        assert torch.equal(rms_norm(x, gain, EPS), trained)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-13)])
def test_gradients_are_those_of_the_formula(shape, dtype, rounding):
    x, gain, dy = inputs(shape, dtype)
    found = torch.autograd.grad(rms_norm(x, gain, EPS), (x, gain), dy)
    exact_x, exact_gain = (tensor.detach().double().requires_grad_() for tensor in (x, gain))
    formula = exact_x / (exact_x.square().mean(-1, keepdim=True) + EPS).sqrt() * exact_gain
    for ours, exact, given in zip(
        found, torch.autograd.grad(formula, (exact_x, exact_gain), dy.double()), (x, gain), strict=True
    ):
        assert ours.dtype == given.dtype
        # Over one channel the gradient is what is left of two numbers of the size of dy · gain / x.
        scale = max(float(exact.norm()), float((dy * gain / x).detach().norm()) if shape[-1] == 1 else 0.0)
        assert float((ours.double() - exact).norm()) <= rounding * scale


def test_gradients_are_float32_inside_whatever_autocast_is_on():
    x, gain, dy = inputs((2, 700, 1000), torch.float32)
    plain = torch.autograd.grad(rms_norm(x, gain, EPS), (x, gain), dy)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(rms_norm(x, gain, EPS), (x, gain), dy)
    assert all(torch.equal(a, b) for a, b in zip(plain, within, strict=True))


def test_it_keeps_its_input_and_one_number_a_row():
    x, gain, _ = inputs((2, 700, 1000), torch.float32)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        rms_norm(x, gain, EPS)
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, gain)}
    assert given < set(kept)
    assert sum(tensor.numel() for pointer, tensor in kept.items() if pointer not in given) == 2 * 700


def test_rows_that_lie_apart_and_a_gain_that_is_frozen():
    x, _, dy = inputs((3, 64, 40), torch.float32)
    gain = torch.linspace(0.5, 1.5, 64)
    found, exact = (
        norm(x.transpose(1, 2))
        for norm in (
            lambda rows: rms_norm(rows, gain, EPS),
            lambda rows: F.rms_norm(rows.double(), (64,), gain.double(), EPS),
        )
    )
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy.transpose(1, 2).to(y.dtype))[0] for y in (found, exact)))


def test_a_compiled_graph_has_torchs_own():
    x, gain, dy = inputs((2, 3, 64), torch.float32)
    nodes = []

    def backend(graph, _):
        nodes.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    y = torch.compile(rms_norm, backend=backend, fullgraph=True)(x, gain, EPS)
    assert nodes == [torch.rms_norm]
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(rms_norm(x, gain, EPS), x, dy))
