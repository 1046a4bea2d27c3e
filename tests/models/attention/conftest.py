"""CUDA's fused attention operators as slow formulas on CPU, under torch's own schemas; kernels in Triton under its
interpreter.
"""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from birthmark import kernel_devices
from birthmark.models.attention.fused import backends


def _weights(q, k, scale, causal, window):
    """Scores, −inf where unseen; q and k ``[B, H, T, K]``, as wide as they are."""
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    unseen = (key > query) & causal | (key <= query - (window or k.shape[2]))
    return (q @ k.transpose(-1, -2) * scale).masked_fill(unseen, -torch.inf)


def _forward(q, k, v, scale, causal, window=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = _weights(q, k, scale, causal, window)
    return scores.softmax(-1) @ v, scores.logsumexp(-1).float() if q.dtype != torch.float64 else scores.logsumexp(-1)


def _backward(d_out, q, k, v, out, lse, scale, causal, window=None):
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    weights = (_weights(q, k, scale, causal, window) - lse[..., None]).exp()
    d_scores = weights * (d_out @ v.transpose(-1, -2) - (d_out * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, shared)).sum(2) for x in (d_scores.mT @ q, weights.mT @ d_out))
    return d_scores @ k, dk, dv


def _allowed_by_flash(q, k, *others):
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.stride(-1) == k.stride(-1) == 1


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _allowed_by_flash(q, k)
    out, lse = _forward(q, k, v, scale, is_causal)
    seed = torch.zeros(2, dtype=torch.int64)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, torch.tensor(7), q.new_empty(0)


def _flash_backward(d_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale):
    _allowed_by_flash(q, k)
    assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
    assert (seed.tolist(), offset.item()) == ([0, 0], 7)
    return _backward(d_out, q, k, v, out, lse, scale, is_causal)


def _windowed(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, mask, *, scale=None, window_size_left=None,
    window_size_right=None, **more,
):  # fmt: skip
    assert (max_q, max_k, window_size_right, is_causal) == (q.shape[1], k.shape[1], 0, True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _allowed_by_flash(q, k)
    out, lse = _forward(q, k, v, scale, is_causal, window_size_left + 1)
    return out.transpose(1, 2).contiguous(), lse, torch.zeros(2), torch.tensor(7), q.new_empty(0)


def _windowed_backward(
    d_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert (max_q, max_k, window_size_right, is_causal, unused.item()) == (q.shape[1], k.shape[1], 0, True, 7)
    d_out, q, k, v, out = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
    found = _backward(d_out, q, k, v, out, lse, scale, is_causal, window_size_left + 1)
    return tuple(x.transpose(1, 2) for x in found)


def _cudnn(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert (bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    assert q.shape[-1] % 8 == 0
    out, lse = _forward(q, k, v, scale, is_causal)
    out = torch.empty_like(q[..., : v.shape[-1]]).copy_(out)  # in the layout of the queries
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], torch.tensor(5), torch.tensor(6), None


def _cudnn_backward(
    d_out, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    assert (max_q, max_k, dropout_p, bias, cum_q, cum_k) == (q.shape[2], k.shape[2], 0.0, None, None, None)
    assert (seed.item(), offset.item(), lse.shape[-1]) == (5, 6, 1)
    # torch finds the graph that cuDNN runs by the layouts of q, k and v alone.
    assert d_out.stride() == out.stride()
    return _backward(d_out, q, k, v, out, lse[..., 0], scale, is_causal)


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert q.shape[-1] % 8 == 0
    assert compute_log_sumexp
    out, lse = _forward(q, k, v, scale, is_causal)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out, lse, torch.tensor(3), torch.tensor(4)


def _efficient_backward(d_out, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None):
    assert lse.shape[-1] % 32 == 0
    assert (seed.item(), offset.item(), mask[:3]) == (3, 4, [True] * 3)
    return *_backward(d_out, q, k, v, out, lse[..., : q.shape[2]], scale, is_causal), None


_OPERATORS = {
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_forward": _windowed,
    "_flash_attention_backward": _windowed_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


@pytest.fixture(params=["cuDNN", "flash", "memory-efficient"])
def cuda_operators(request, monkeypatch):
    """Kernels are chosen as on CUDA, from one row of the table, which takes float64 too; the operators are formulas."""
    (row,) = (row for row in backends.BACKENDS["cuda"] if row.name == request.param)
    wide = replace(row, dtypes=(*row.dtypes, torch.float32, torch.float64), here=lambda q: True)
    monkeypatch.setitem(backends.BACKENDS, "cuda", (wide,))
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in _OPERATORS.items():
            library.impl(name, function, "CPU")
        yield request.param


@pytest.fixture(scope="module")
def small_tiles():
    """Several tiles to a head, the last cut short; and products of bf16, whose bits the interpreter of Triton 3.9
    takes for whole numbers.
    """
    interpreter, language = import_module("triton.runtime.interpreter"), import_module("triton.language")
    module = import_module("birthmark.models.attention.fused.one_walk_kernel")
    builder = interpreter.InterpreterBuilder
    product = builder.create_dot

    def wide(handle):
        if handle.dtype != language.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), language.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", lambda self, a, b, *more: product(self, wide(a), wide(b), *more))
        sizes = {"forward": (32, 16), "keys": (16, 32), "queries": (32, 16), "sums": (32, 16), "received": (16, 32)}
        tiles = {name: (module.Tile(*size, 4, 1),) * 3 for name, size in sizes.items()}
        patch.setattr(module, "TILES", tiles)
        yield
