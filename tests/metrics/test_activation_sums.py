"""Sums over activations in all ways that they are computed, against formulas in float64."""

import pytest
import torch
import triton_kernels
from torch.nn import functional as F

from birthmark.metrics import activation_sums
from birthmark.metrics.activation_sums import ActivationSums, channel_norms


class Elsewhere(torch.Tensor):
    """A tensor of the CPU that says it is on another device: what a GPU computes is computed here."""

    device = torch.device("mps")


def activations(shape, dtype=torch.float32, seed=0):
    x_BTD = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3
    # A massive activation, and two vectors of zeros, one of them last.
    x_BTD[0, 1, 2] = -300
    x_BTD[1, 0] = x_BTD[-1, -1] = 0
    return x_BTD.to(dtype)


def formulas(x_BTD):
    """All sums of :class:`ActivationSums` by name, from the whole tensor in float64."""
    x = x_BTD.double()
    norm = x.square().sum(-1).sqrt()
    away = x - x.mean((1, 2), keepdim=True)
    return {
        "total": x.sum((1, 2)),
        "norm": norm,
        "largest": x.abs().amax(-1),
        "largest_of_sequences": x.abs().amax(0),
        "mean_size": x.abs().mean(-1),
        "unit_sum": torch.where(norm[..., None] > 0, x / norm[..., None], 0.0).sum(1),
        "first_size": x[:, 0].abs(),
        "later_size": x[:, 1:].abs().sum(1),
        "second_BT": away.square().sum(-1),
        "fourth_root_BT": away.pow(4).sum(-1).sqrt(),
        "away_squared_BD": away.square().amax(1),
    }


def check(sums, x_BTD, tolerance):
    about_mean = sums.about_mean()
    for name, wanted in formulas(x_BTD).items():
        found = getattr(about_mean if hasattr(about_mean, name) else sums, name).as_subclass(torch.Tensor)
        atol = tolerance * float(wanted.abs().amax())
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torchs_operators_give_the_formulas_on_every_device(kind, dtype, monkeypatch):
    # Of several blocks, in which sequences and positions are split.
    monkeypatch.setattr(activation_sums, "_CACHED", 20)
    monkeypatch.setattr(activation_sums, "_TOGETHER", 20)
    x_BTD = activations((3, 7, 5), dtype)
    sums = ActivationSums(x_BTD.as_subclass(kind))
    check(sums, x_BTD, 1e-12 if dtype == torch.float64 else 1e-6)
    wide = torch.promote_types(dtype, torch.float32)
    assert {sums.total.dtype, sums.norm.dtype, sums.later_size.dtype} == {wide}
    heads = x_BTD.as_subclass(kind)[:, None]
    torch.testing.assert_close(
        channel_norms(heads).as_subclass(torch.Tensor)[:, 0], sums.norm.as_subclass(torch.Tensor)
    )


@pytest.mark.parametrize("device", ["torch", *triton_kernels.DEVICES])
def test_rows_whose_squares_underflow_have_no_direction(device, monkeypatch):
    """Down to a norm of 2·10⁻¹⁸ each counts as one unit vector; one of 10⁻²⁵ as next to none."""
    if device != "torch":
        monkeypatch.setattr(activation_sums, "fuses_rows", lambda _: True)
    x_BTD = activations((2, 12, 48))[:, 1:2].repeat(1, 4, 1)
    sizes = torch.tensor([1e-17, 1e-25, 0.0, 1.0])
    x_BTD = F.normalize(x_BTD, dim=-1) * sizes[:, None]
    found = ActivationSums(x_BTD.to("cpu" if device == "torch" else device)).unit_sum.cpu()
    torch.testing.assert_close(found, 2 * x_BTD[:, 3], rtol=1e-5, atol=1e-6)


def test_moments_are_those_of_the_sequences_whole():
    x_BTD = activations((2, 700, 128))
    found, whole = ActivationSums(x_BTD).about_mean().moments(), x_BTD.double().flatten(1)
    torch.testing.assert_close(found.std_B, whole.std(1), rtol=1e-6, atol=0)
    fourth = (x_BTD.double() - whole.mean(1)[:, None, None]).pow(4).mean(-1)
    torch.testing.assert_close(found.fourth_BT, fourth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", triton_kernels.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 70, 48), (3, 32, 64), (2, 3, 9000)], ids=str)
def test_the_kernels_give_the_formulas(device, dtype, shape, monkeypatch):
    monkeypatch.setattr(activation_sums, "fuses_rows", lambda _: True)
    whole_BTD = activations((shape[0], shape[1] + 2, shape[2] + 8), dtype).to(device)
    # Rows that do not follow one another.
    x_BTD = whole_BTD[:, 1:-1, : shape[2]]
    sums = ActivationSums(x_BTD)
    check(sums, x_BTD, 2e-6)
    assert sums._rows is not None
    # A mean far above the deviation does no harm.
    shifted = torch.full_like(x_BTD, 3.0)
    assert ActivationSums(shifted).about_mean().second_BT.amax() == 0
