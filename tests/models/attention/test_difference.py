"""The normalised difference of two softmaxes: against the formula in float64, by kernels under Triton's interpreter or
on a GPU, alone and in differential attention.

Triton decides as it is imported whether it interprets: run this file alone, with ``TRITON_INTERPRET=1``.
"""

import pytest
import torch
from triton_kernels import DEVICES, interpret

from birthmark.models.attention.attention import Attention
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.attention.fused import difference as module
from birthmark.models.attention.fused.difference import normed_difference
from birthmark.models.attention.positions import POSITIONS
from birthmark.models.config import ModelConfig

B, H, T, EPS, TIMES = 2, 6, 41, 1e-2, 0.7
#: Relative error of the largest number: float32 sums, and one rounding to the type of the rows.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        # Several blocks to a part and several parts to a head, the last cut short.
        interpret(monkeypatch, module, _TILE=128, _PART=16)
    return request.param


def formula(x, z, share, gain):
    """The definition, head by head."""
    pairs = []
    for i in range(0, x.shape[1], 2):
        both = torch.cat([each[:, i] - share * each[:, i + 1] for each in (x, z)], dim=-1)
        normed = both / (both.square().mean(-1, keepdim=True) + EPS).sqrt() * gain * TIMES
        pairs += normed.chunk(2, dim=-1)
    return torch.stack(pairs, dim=1)


def with_gradients(function, leaves, upstream):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 12), (torch.bfloat16, 16), (torch.float16, 40)])
@pytest.mark.parametrize("wide", [False, True], ids=["two outputs", "one of twice the width"])
def test_the_kernels_follow_the_formula(dtype, width, wide, device):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    # The heads of a position side by side, as fused attention leaves them.
    both = drawn(B, T, H, 2 * width).to(dtype).transpose(1, 2).chunk(2, dim=-1)
    x, z = both if wide else (part.transpose(1, 2).contiguous().transpose(1, 2) for part in both)
    share, gain = torch.tensor(0.3).to(device), 1 + drawn(2 * width)
    d = drawn(B, H, T, width).to(dtype)
    found = with_gradients(lambda x, z, *more: normed_difference([x, z], *more, EPS, TIMES), (x, z, share, gain), d)
    exact = with_gradients(formula, [given.double() for given in (x, z, share, gain)], d.double())
    assert found[0].transpose(1, 2).is_contiguous()
    for one, wanted in zip(found, exact, strict=True):
        tolerance = TOLERANCES[one.dtype if one.ndim == 4 else torch.float32]
        assert float((one.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize(("kv_bias", "n_calls"), [("none", 1), ("value", 0)])
def test_differential_attention_is_that_of_torchs_operators(kv_bias, n_calls, device, monkeypatch):
    """A value that is added to the outputs comes before their norm: the kernel stands aside."""
    attention = AttentionConfig("differential_norm", normaliser="differential", kv_bias=kv_bias)
    config = ModelConfig(d_model=48, n_layers=1, n_heads=4, vocab_size=8, max_seq_len=T, attention=attention)
    torch.manual_seed(0)
    layer = Attention(config, 0).to(device)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x, place = torch.randn(B, T, 48).to(device), POSITIONS[config.positions](config).place(T, torch.device(device))
    calls, normed = [], module._normed
    monkeypatch.setattr(module, "_normed", lambda *args: calls.append(args) or normed(*args))

    def gradients():
        leaves = [x.requires_grad_(), *layer.parameters()]
        y = layer(x, place)
        return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)

    found = gradients()
    assert len(calls) == n_calls
    monkeypatch.setattr("birthmark.models.attention.differential.normed_difference", lambda *_: None)
    for one, wanted in zip(found, gradients(), strict=True):
        assert float((one - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())
