"""Loss of the output head: a linear map and the cross-entropy of its logits in one, over chunks of rows.

Logits are the largest tensor of a training step. Here a chunk of rows at a time is mapped to logits, turned into losses
and, where gradients are wanted, at once into the gradients of hidden states and table: the loss is a weighted mean
whose weights are known beforehand, so the backward pass only multiplies by one factor. There are three matrix products,
as in the plain formula, and no logit is computed twice (Liger, arXiv 2410.10989). It is a registered operator, so that
a compiled graph calls it unchanged. On a GPU one kernel turns a chunk's logits into losses and gradients
(``loss_kernel.py``), and the table's gradient is summed in float32 inside its product.

torch's ``F.linear_cross_entropy`` (from 2.13 on) does the same for a plain cross-entropy; it knows neither z-loss nor
soft-capping, and earlier versions lack it. Tests compare this one with it.

Legend: N rows (positions of all sequences), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernel_devices import runs_on, why_not_triton
from .experts.routing_losses import RoutingCost

#: A target that counts nowhere.
IGNORED = -100
#: On CPU, up to so many logits the plain formula is used: it is as fast or faster there, and its logits take little.
PLAIN = 1 << 22
#: Bytes of a chunk's logits, per logit of all rows; and the bytes that are allowed in any case, since smaller products
#: are slower: peaks are below 1.2 bytes per logit from 64 million logits on.
_BYTES_PER_LOGIT, _LEAST_BYTES = 1.0, 1 << 26
#: Rows of a chunk at most: larger products are no faster.
_MOST_ROWS = 2048
#: Numbers that are processed at a time: on CPU as many as a core's cache holds, for each of its threads, else as many
#: as keep a device busy; and at most this share of all logits.
_BLOCK_CPU, _BLOCK, _BLOCK_SHARE = 1 << 18, 1 << 23, 1 / 64
#: Elements of the table whose gradient is summed at a time, where products are rounded to bf16.
_TABLE_PART = 1 << 21


class TokenLosses(NamedTuple):
    """Losses of next-token predictions, in nats, float32 or wider. Only ``objective`` carries gradients."""

    objective: Tensor
    """Scalar that training minimises: ``cross_entropy + z_loss``, plus the routers' costs."""
    cross_entropy: Tensor
    """Scalar: mean of −log p(target) over the targets that count."""
    z_loss: Tensor
    """Scalar: the coefficient times the mean of the squared log-sum-exp of the logits (PaLM, arXiv 2204.02311)."""
    per_token: Tensor
    """−log p(target) of every target, in the targets' shape; 0 where it is ignored."""
    routing: RoutingCost | None = None
    """Routers' costs of a model with experts in a training pass; the objective contains them times their
    coefficients.
    """


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses: float32, or the logits' dtype if wider."""
    return torch.promote_types(dtype, torch.float32)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Compute ``cap · tanh(logits / cap)`` (Gemma 2, arXiv 2408.00118); ``None`` leaves logits unchanged."""
    return logits if cap is None else (torch.tanh(logits.to(wide(logits.dtype)) / cap) * cap).to(logits.dtype)


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    z_loss: float = 0.0,
    cap: float | None = None,
    plain: bool | None = None,
    n_counted: Tensor | None = None,
) -> TokenLosses:
    """Compute the losses of the logits ``x @ weightᵀ``, in the dtype of ``x``, or that of autocast.

    Second derivatives are refused; so is a backward pass that would find its gradients scaled by an earlier one.

    Args:
        x_ND: hidden states.
        weight_VD: the table of output vectors.
        targets_N: int64 token ids, :data:`IGNORED` for rows that do not count. If none counts, means are NaN.
        z_loss: coefficient of the squared log-sum-exp.
        cap: cap of :func:`soft_capped`.
        plain: hold all logits at once; by default if they are few, see :data:`PLAIN`.
        n_counted: number that sums over rows are divided by, ``[]``, for the mean over processes to be that over their
            rows; by default the number of rows that count.
    """
    kind = x_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_ND.dtype
    counts_N = (targets_N != IGNORED).to(wide(dtype))
    weights_N = counts_N / (counts_N.sum() if n_counted is None else n_counted)
    few = runs_on(x_ND) == "cpu" and x_ND.shape[0] * weight_VD.shape[0] <= PLAIN
    if few if plain is None else plain:
        objective, losses_N, squares_N = _plain(x_ND, weight_VD, targets_N, weights_N, z_loss, cap, dtype)
    else:
        wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x_ND, weight_VD)]
        objective, losses_N, squares_N, _, _ = _chunked(
            x_ND, weight_VD, targets_N, weights_N, z_loss, cap or 0.0, dtype, *wants
        )
    if not z_loss:
        return TokenLosses(objective, objective.detach(), torch.zeros_like(objective), losses_N)
    z = z_loss * (squares_N * weights_N).sum()
    return TokenLosses(objective, (losses_N * weights_N).sum(), z, losses_N)


def _plain(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    z_loss: float,
    cap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses by the plain formula."""
    logits_NV = soft_capped(F.linear(x_ND.to(dtype), weight_VD.to(dtype)).to(wide(dtype)), cap)
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=IGNORED)
    objective = (losses_N * weights_N).sum()
    if not z_loss:
        return objective, losses_N.detach(), torch.zeros_like(losses_N)
    squares_N = logits_NV.logsumexp(-1).square()
    return objective + z_loss * (squares_N * weights_N).sum(), losses_N.detach(), squares_N.detach()


def chunk_rows(n_rows: int, vocab_size: int, itemsize: int) -> int:
    """Choose the number of rows whose logits, of ``itemsize`` bytes each, are held at once."""
    least, share = _LEAST_BYTES // (vocab_size * itemsize), int(_BYTES_PER_LOGIT * n_rows) // itemsize
    most = max(1, min(n_rows, _MOST_ROWS, max(least, share)))
    # Chunks of equal size: every chunk reads the whole table, however few its rows.
    return -(-n_rows // -(-n_rows // most)) if n_rows else 1


def _block_rows(n_rows: int, vocab_size: int, device: str) -> int:
    numbers = _BLOCK_CPU * torch.get_num_threads() if device == "cpu" else _BLOCK
    share = int(_BLOCK_SHARE * n_rows)
    return max(1, min(numbers // vocab_size, max(share, _BLOCK_CPU // vocab_size)))


def workspace_bytes(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Callable[[int], int]:
    """Return a function from the number of rows to the bytes that the operator takes while it runs, beside inputs and
    outputs.
    """
    (vocab_size, width), device = weight.shape, runs_on(x)
    one_kernel = device == "cuda"
    exact, itemsize, wide_itemsize = dtype == wide(dtype), dtype.itemsize, wide(dtype).itemsize
    casts_x, casts_weight, rounds = x.dtype != dtype, weight.dtype != dtype, weight.dtype != wide(dtype)

    def of(n_rows: int) -> int:
        rows = chunk_rows(n_rows, vocab_size, itemsize)
        block = 0 if one_kernel else min(rows, _block_rows(n_rows, vocab_size, device))
        blocks = block * vocab_size * wide_itemsize * (1 if exact else 2)
        casts = itemsize * width * (n_rows * casts_x + vocab_size * casts_weight)
        # A table that is gathered in bf16 has its gradient summed in float32 all the same.
        sums = wide_itemsize * vocab_size * width * rounds
        part = 0 if exact or one_kernel else itemsize * min(_TABLE_PART, vocab_size * width)
        return rows * vocab_size * itemsize + blocks + casts + sums + part

    return of


def _one_kernel(x: Tensor, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return the function that does a chunk's work in one kernel (``loss_kernel.py``), on the device of ``x`` and for
    logits of this type; None without one.
    """
    if not x.is_cuda or why_not_triton("cuda"):
        return None
    from .loss_kernel import DTYPES, losses_of_rows

    return losses_of_rows if dtype in DTYPES else None


class _Rows:
    """Converter of logits to losses and, on request, to gradients, a block of rows at a time.

    Every block works in the same memory: it stays in the processor's cache, and is mapped once.
    """

    def __init__(self, logits_CV: Tensor, n_rows: int, z_loss: float, cap: float) -> None:
        n, vocab_size = logits_CV.shape
        self.z_loss, self.cap = z_loss, cap
        self.n = min(n, _block_rows(n_rows, vocab_size, logits_CV.device.type))
        dtype = wide(logits_CV.dtype)
        # Logits that are wide enough are worked on where they are.
        copied = logits_CV.dtype != dtype
        self.copies = logits_CV.new_empty((self.n, vocab_size), dtype=dtype) if copied else None
        self.shares = logits_CV.new_empty((self.n, vocab_size), dtype=dtype)

    def __call__(
        self,
        logits_CV: Tensor,
        targets_C: Tensor,
        weights_C: Tensor,
        losses_C: Tensor,
        squares_C: Tensor,
        wants_gradients: bool,
    ) -> None:
        """Fill in losses and squared log-sum-exps; ``logits`` become the gradient of the objective by them."""
        for start in range(0, len(logits_CV), self.n):
            block = slice(start, start + self.n)
            given = targets_C[block], weights_C[block], losses_C[block], squares_C[block]
            self._block(logits_CV[block], *given, wants_gradients)

    def _block(
        self,
        logits_RV: Tensor,
        targets_R: Tensor,
        weights_R: Tensor,
        losses_R: Tensor,
        squares_R: Tensor,
        wants_gradients: bool,
    ) -> None:
        n = len(logits_RV)
        z_RV = logits_RV if self.copies is None else self.copies[:n].copy_(logits_RV)
        if self.cap:
            z_RV.div_(self.cap).tanh_().mul_(self.cap)
        target_R1 = targets_R.clamp_min(0)[:, None]
        p_RV = torch.softmax(z_RV, -1, out=self.shares[:n])
        # From the likeliest token, whose share never underflows.
        top_R = z_RV.amax(-1)
        log_top_R = p_RV.amax(-1).log_()
        losses_R.copy_((top_R - z_RV.gather(1, target_R1)[:, 0] - log_top_R).masked_fill_(targets_R == IGNORED, 0.0))
        lse_R = top_R - log_top_R
        squares_R.copy_(lse_R.square())
        if not wants_gradients:
            return
        p_RV.mul_((weights_R * (1 + 2 * self.z_loss * lse_R))[:, None] if self.z_loss else weights_R[:, None])
        p_RV.scatter_add_(1, target_R1, -weights_R[:, None])
        if self.cap:
            p_RV.mul_(z_RV.div_(self.cap).square_().neg_().add_(1.0))
        logits_RV.copy_(p_RV)


def _add_products(table_VD: Tensor, d_logits_CV: Tensor, x_CD: Tensor, first: bool) -> None:
    """Add ``table += d_logitsᵀ @ x``, or assign it for the first chunk, summed in the table's dtype."""
    if table_VD.dtype == x_CD.dtype:
        # beta 0 leaves the old content unread.
        table_VD.addmm_(d_logits_CV.T, x_CD, beta=0.0 if first else 1.0)
        return
    if table_VD.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):  # not in torch's earliest versions
        # Products of bf16 numbers, summed in float32 from the first to the last.
        torch.ops.aten.addmm.dtype_out(
            table_VD, d_logits_CV.T, x_CD, table_VD.dtype, beta=0.0 if first else 1.0, out=table_VD
        )
        return
    step = max(1, _TABLE_PART // x_CD.shape[1])
    for start in range(0, len(table_VD), step):
        part = table_VD[start : start + step]
        product = torch.mm(d_logits_CV[:, start : start + step].T, x_CD)
        part.copy_(product) if first else part.add_(product)


@torch.library.custom_op("birthmark::linear_cross_entropy", mutates_args=())
def _chunked(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_weights: torch.Tensor,
    z_loss: float,
    cap: float,
    dtype: torch.dtype,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute objective, losses ``[N]``, squared log-sum-exps ``[N]``, and the objective's gradients, empty if not
    wanted.
    """
    (n, width), vocab_size = x.shape, len(weight)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x_ND, weight_VD = x.to(dtype), weight.to(dtype)
        losses_N, squares_N = torch.empty_like(row_weights), torch.empty_like(row_weights)
        dx_ND = x_ND.new_empty((n, width) if wants_x else 0)
        d_weight = x_ND.new_empty((vocab_size, width) if wants_weight else 0, dtype=wide(dtype))
        size = chunk_rows(n, vocab_size, x_ND.itemsize)
        buffer_CV = x_ND.new_empty(min(size, n), vocab_size)
        kernel = _one_kernel(x, dtype)
        if kernel is None:
            work: Callable[..., None] = _Rows(buffer_CV, n, z_loss, cap)
        else:
            work = partial(kernel, ignored=IGNORED, z_loss=z_loss, cap=cap)
        for start in range(0, n, size):
            chunk = slice(start, min(start + size, n))
            logits_CV = torch.mm(x_ND[chunk], weight_VD.T, out=buffer_CV[: chunk.stop - start])
            given = targets[chunk], row_weights[chunk], losses_N[chunk], squares_N[chunk]
            work(logits_CV, *given, wants_x or wants_weight)
            if wants_x:
                torch.mm(logits_CV, weight_VD, out=dx_ND[chunk])
            if wants_weight:
                _add_products(d_weight, logits_CV, x_ND[chunk], first=start == 0)
        objective = ((losses_N + z_loss * squares_N) * row_weights).sum()
        return objective, losses_N, squares_N, dx_ND, d_weight.to(weight.dtype)


@_chunked.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_weights: torch.Tensor,
    z_loss: float,
    cap: float,
    dtype: torch.dtype,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = x.new_empty(x.shape if wants_x else (0,), dtype=dtype)
    d_weight = weight.new_empty(weight.shape if wants_weight else (0,))
    return row_weights.new_empty(()), torch.empty_like(row_weights), torch.empty_like(row_weights), dx, d_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # of what carries none: as large as the table
    ctx.save_for_backward(*output[3:])
    ctx.x_dtype, *ctx.wants = inputs[0].dtype, *inputs[-2:]


def _is_one(factor: Tensor) -> bool:
    """Return True if a factor is known to be 1, without a wait for an accelerator or a value from a traced graph."""
    return type(factor) is Tensor and factor.device.type == "cpu" and factor.item() == 1


def _gradients(ctx: Any, d_objective: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("linear_cross_entropy has no second derivatives: differentiate the plain formula")
    # In place, so that the table's gradient exists once; torch refuses the second backward pass that would find it so.
    dx, d_weight = ctx.saved_tensors
    dx = dx.to(ctx.x_dtype)
    if not _is_one(d_objective):
        dx.mul_(d_objective)
        d_weight.mul_(d_objective)
    wants_x, wants_weight = ctx.wants
    return dx if wants_x else None, d_weight if wants_weight else None, *[None] * 7


_chunked.register_autograd(_gradients, setup_context=_save)
