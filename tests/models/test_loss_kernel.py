"""The kernel of the loss, under Triton's interpreter on a CPU: against the formula in float64.

On a GPU ``test_linear_cross_entropy.py`` runs the kernel.
"""

from importlib import import_module

import pytest
import torch

pytestmark = pytest.mark.interpreter

IGNORED = -100


@pytest.fixture
def kernel(monkeypatch):
    """The module, with several blocks to a row, the last cut short."""
    module = import_module("birthmark.models.loss_kernel")
    monkeypatch.setattr(module, "_BLOCK", 256)
    return module


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize(("z_loss", "cap"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 4.0), (1e-2, 4.0)])
def test_losses_and_gradients_are_those_of_the_formula(kernel, dtype, tolerance, z_loss, cap):
    generator = torch.Generator().manual_seed(0)
    given = (torch.randn(7, 1000, generator=generator) * 3).to(dtype)
    targets = torch.randint(1000, (7,), generator=generator)
    targets[2] = IGNORED
    weights = (targets != IGNORED).float()
    weights /= weights.sum()
    logits = given.double().requires_grad_()
    capped = cap * torch.tanh(logits / cap) if cap else logits
    lse = capped.logsumexp(-1)
    losses = torch.where(targets == IGNORED, 0, lse - capped[torch.arange(7), targets.clamp_min(0)])
    (wanted,) = torch.autograd.grad((losses * weights).sum() + z_loss * (lse**2 * weights).sum(), logits)
    settings = {"ignored": IGNORED, "z_loss": z_loss, "cap": cap}
    for wants_gradients in (False, True):
        found, squares, buffer = torch.empty(7), torch.empty(7), given.clone()
        kernel.losses_of_rows(buffer, targets, weights, found, squares, **settings, wants_gradients=wants_gradients)
        torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(squares.double(), lse.detach() ** 2, rtol=1e-6, atol=1e-6)
        if not wants_gradients:
            assert torch.equal(buffer, given)
    assert float((buffer.double() - wanted).norm() / wanted.norm()) < tolerance
    assert not buffer[2].any()


def test_logits_of_thousands_overflow_nothing(kernel):
    """The likeliest token far above the others, and far below the target's."""
    logits = torch.tensor([[5000.0, 0.0, -5000.0, 0.0]] * 2)
    losses, squares = torch.empty(2), torch.empty(2)
    kernel.losses_of_rows(
        logits, torch.tensor([0, 2]), torch.ones(2), losses, squares,
        ignored=IGNORED, z_loss=0.0, cap=0.0, wants_gradients=True,
    )  # fmt: skip
    assert losses.tolist() == [0.0, 10000.0]
    assert logits.tolist() == [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, -1.0, 0.0]]
