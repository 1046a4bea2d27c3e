"""Softmax attention that also returns its log-sum-exp, differentiable in both, without a T×T matrix.

The log-sum-exp of a row's scores gives every weight of the row afterwards, ``a[t,j] = exp(s[t,j] − lse[t])``, and two
attentions over different keys merge by their log-sum-exps, so all code that needs weights, or merges a row from several
attentions (windows, prefixes, extra keys), uses it in place of the matrix.

Legend: B sequences, H query heads, G key/value heads, T positions, N keys beside the
tokens', K head width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ....kernel_devices import runs_on
from ..document_mask import Documents
from . import native
from .backends import FusedAttention, as_wide, backend_for, over_heads
from .blockwise import causal_blocks, keeps_weights
from .rows import logsumexp_of_all, scaled

#: Channels of unused values, for kernels that take fewer for values than for keys.
_FEW_CHANNELS = 16
#: Channels of a head beyond which a GPU's kernels multiply more slowly.
_WIDE = 128


def _runs_c_kernel(q: Tensor, causal: bool = True) -> bool:
    return causal and runs_on(q) == "cpu" and q.dtype == torch.bfloat16


def causal_bf16(q: Tensor, k: Tensor, v: Tensor, scale: float, wants_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run causal attention in bf16 on a CPU; return the output ``[B, H, T, V]`` and, on request, in float32 ``[B, H,
    T]``, the log-sum-exp of each query's scores and the sum of its squared weights.
    """
    kernel = native.causal_tiles if native.is_built() else causal_blocks
    return kernel(q, k, v, scale, wants_sums)


def wide_values_pay(q_BHTK: Tensor, width: int) -> bool:
    """Return True if values wider than queries are summed faster at once than in parts of the queries' width.

    Kernels that want one width get queries and keys padded with zeros: the products cost the same as in parts, and the
    softmax is computed once.
    """
    return runs_on(q_BHTK) == "cpu" or width <= _WIDE


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> tuple[Tensor, Tensor]:
    backend = backend_for(runs_on(q), q, window)
    out, lse = FusedAttention.apply(q, k, v, None, None, backend, scale, causal, window)
    return out, lse


def attention_with_lse(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention: output ``[B, H, T, K]`` and log-sum-exp of the scaled scores ``[B, H, T]``.

    Both carry gradients. The log-sum-exp is float32 or wider whatever the inputs are.
    """
    if _runs_c_kernel(q_BHTK, causal):
        return causal_bf16(q_BHTK, k_BGSK, v_BGSK, scale, wants_sums=True)[:2]
    return _fused(q_BHTK, k_BGSK, v_BGSK, scale, causal)


def set_beside(out_BHTK: Tensor, lse_BHT: Tensor, others_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """Scale an output over tokens alone to its share beside other keys: return it ``[B, H, T, K]``, and the log-sum-exp
    over all keys ``[B, H, T]``. Takes output and log-sum-exp over tokens, and the log-sum-exp of the others.
    """
    total_BHT = torch.logaddexp(lse_BHT, others_BHT)
    return scaled(out_BHTK, (lse_BHT - total_BHT).exp()), total_BHT


def attention_beside(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    scale: float,
    others_BHTN: Tensor,
    values_HNK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal attention over tokens and over further keys. Return the output ``[B, H, T, K]``, and the
    log-sum-exps of the scores of tokens and of all keys ``[B, H, T]``. All carry gradients.

    Args:
        q_BHTK: queries.
        k_BGTK: keys of the tokens.
        v_BGTK: their values.
        scale: scale of the scores.
        others_BHTN: scores of the other keys, float32 or wider.
        values_HNK: values of those keys; None: zero.
    """
    if _runs_c_kernel(q_BHTK):
        out, lse = attention_with_lse(q_BHTK, k_BGTK, v_BGTK, scale)
        total = logsumexp_of_all(lse, others_BHTN)
        out = scaled(out, (lse - total).exp())
        if values_HNK is not None:
            shares_BHTN, values_HNK = (others_BHTN - total[..., None]).exp().to(out.dtype), values_HNK.to(out.dtype)
            out = out + (shares_BHTN * values_HNK if values_HNK.shape[1] == 1 else shares_BHTN @ values_HNK)
        return out, lse, total
    backend = backend_for(runs_on(q_BHTK), q_BHTK)
    found: tuple[Tensor, Tensor, Tensor] = FusedAttention.apply(
        q_BHTK, k_BGTK, v_BGTK, others_BHTN, values_HNK, backend, scale, True, None
    )
    return found


def attention_with_squares(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal :func:`attention_with_lse`, and each query's sum of squared weights ``Σ_j a²`` ``[B, H, T]``."""
    if _runs_c_kernel(q_BHTK):
        return causal_bf16(q_BHTK, k_BGTK, v_BGTK, scale, wants_sums=True)
    out, lse = attention_with_lse(q_BHTK, k_BGTK, v_BGTK, scale)
    return out, lse, (visible_lse(q_BHTK, k_BGTK, 2 * scale) - 2 * lse).exp()


def causal_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float) -> Tensor:
    """Compute only the output of causal softmax attention, ``[B, H, T, K]``, on the fastest kernel available."""
    if _runs_c_kernel(q_BHTK) and (native.is_built() or keeps_weights(q_BHTK)):
        return causal_bf16(q_BHTK, k_BGTK, v_BGTK, scale, wants_sums=False)[0]
    backend = backend_for(runs_on(q_BHTK), q_BHTK)
    # A GPU's kernels read whole 16 bytes: of other rows torch would make the matrix of all weights.
    is_ragged = max(q_BHTK.shape[-1], v_BGTK.shape[-1]) * q_BHTK.element_size() % 16 and runs_on(q_BHTK) == "cuda"
    if backend.for_output or is_ragged:
        return _fused(q_BHTK, k_BGTK, v_BGTK, scale)[0]
    if not backend.grouped:
        k_BGTK, v_BGTK = (over_heads(x, q_BHTK.shape[1]) for x in (k_BGTK, v_BGTK))
    grouped, width = k_BGTK.shape[1] != q_BHTK.shape[1], v_BGTK.shape[-1]
    # Only as wide as queries do values run on a fused kernel.
    q_BHTK, k_BGTK, v_BGTK = as_wide(q_BHTK, k_BGTK, v_BGTK)
    out = F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[..., :width] if width < out.shape[-1] else out


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys, from the (output, log-sum-exp) of each."""
    (a_BHTK, lse_a_BHT), (b_BHTK, lse_b_BHT) = first, second
    lse_BHT = torch.logaddexp(lse_a_BHT, lse_b_BHT)
    share_a, share_b = ((x - lse_BHT).exp()[..., None].to(a_BHTK.dtype) for x in (lse_a_BHT, lse_b_BHT))
    return a_BHTK * share_a + b_BHTK * share_b, lse_BHT


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Let every query see itself and the ``window − 1`` keys before it: O(T·window).

    Positions are split into chunks as long as the window. A query sees the keys of its own chunk up to itself, which is
    causal attention, and, in the chunk before, the keys after its own index there, which is causal attention with both
    orders reversed and the queries one step behind.
    """
    n_sequences, length = q.shape[0], q.shape[2]
    n_chunks = -(-length // window)

    # Chunks [B, n_chunks, heads, window, K] count as sequences; the padding of the last is seen by no query that is
    # kept.
    def chunks(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, n_chunks * window - length)).unflatten(2, (n_chunks, window)).transpose(1, 2)

    q, k, v = chunks(q), chunks(k), chunks(v)
    own = attention_with_lse(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale)
    out, lse = (x.unflatten(0, (n_sequences, n_chunks)) for x in own)
    if n_chunks > 1 and window > 1:
        q_late = q[:, 1:].flip(3)[..., 1:, :].flatten(0, 1)
        k_early, v_early = (x[:, :-1].flip(3)[..., :-1, :].flatten(0, 1) for x in (k, v))
        before = attention_with_lse(q_late, k_early, v_early, scale)
        out_b, lse_b = (x.unflatten(0, (n_sequences, n_chunks - 1)).flip(3) for x in before)
        # The first chunk has none before it, and the last query of a chunk sees nothing of it.
        padded = F.pad(out_b, (0, 0, 0, 1, 0, 0, 1, 0)), F.pad(lse_b, (0, 1, 0, 0, 1, 0), value=-torch.inf)
        out, lse = merge((out, lse), padded)
    return out.transpose(1, 2).flatten(2, 3)[:, :, :length], lse.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _of_last_queries(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Compute the last rows of a causal attention: the queries are those of the last keys."""
    n_before = k.shape[2] - q.shape[2]
    if window is None or window >= k.shape[2]:
        before = attention_with_lse(q, k[:, :, :n_before], v[:, :, :n_before], scale, causal=False)
        return merge(before, attention_with_lse(q, k[:, :, n_before:], v[:, :, n_before:], scale))
    # Kernels of windows take as many queries as keys: those of the earlier keys in a window are zeros.
    n_earlier = min(window - 1, n_before)
    k, v = (x[:, :, n_before - n_earlier :] for x in (k, v))
    out, lse = visible_attention(F.pad(q, (0, 0, n_earlier, 0)), k, v, scale, window)
    return out[:, :, n_earlier:], lse[:, :, n_earlier:]


def visible_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    scale: float,
    window: int | None = None,
    prefix: int | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attention_with_lse` where a query t sees the keys t − window + 1 … t, and the first ``prefix``
    positions see each other; each is a separate fused attention. With ``documents``, which excludes a prefix, attend
    within each document. Without a prefix, fewer queries than keys are those of the last keys.
    """
    if documents is not None:
        return documents.attend(partial(visible_attention, scale=scale, window=window), q_BHTK, k_BGTK, v_BGTK)
    if q_BHTK.shape[2] < k_BGTK.shape[2]:
        return _of_last_queries(q_BHTK, k_BGTK, v_BGTK, scale, window)
    if window is None or window >= q_BHTK.shape[2]:
        out, lse = attention_with_lse(q_BHTK, k_BGTK, v_BGTK, scale)
    elif backend_for(runs_on(q_BHTK), q_BHTK, window).windows:
        out, lse = _fused(q_BHTK, k_BGTK, v_BGTK, scale, window=window)
    elif _runs_c_kernel(q_BHTK) and native.is_built():
        out, lse, _ = native.causal_tiles(q_BHTK, k_BGTK, v_BGTK, scale, wants_sums=False, window=window)
    else:
        out, lse = _windowed(q_BHTK, k_BGTK, v_BGTK, scale, window)
    if prefix is None:
        return out, lse
    q, k, v = (x[:, :, :prefix].contiguous() for x in (q_BHTK, k_BGTK, v_BGTK))
    out_p, lse_p = attention_with_lse(q, k, v, scale, causal=False)
    return torch.cat([out_p, out[:, :, prefix:]], dim=2), torch.cat([lse_p, lse[:, :, prefix:]], dim=2)


def visible_lse(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    scale: float,
    window: int | None = None,
    prefix: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Compute only the log-sum-exp of :func:`visible_attention`, ``[B, H, T]``, float32 or wider, differentiable."""
    # The kernels require values, which do not matter to the log-sum-exp.
    v_BGTV = k_BGTK.detach()
    if _runs_c_kernel(q_BHTK) or backend_for(runs_on(q_BHTK), q_BHTK, window).narrow_values:
        v_BGTV = v_BGTV[..., :_FEW_CHANNELS]
    return visible_attention(q_BHTK, k_BGTK, v_BGTV, scale, window, prefix, documents)[1]
