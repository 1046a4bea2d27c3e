"""Grouped products for GPUs: all experts of a mixture at once.

Single products would leave most of the device idle, and the host would have to wait for the counts of rows. A grouped
product reads the counts on the device. Rows are copied into the experts' order and their outputs back, without
concurrent additions to the same memory, so that gradients are reproducible.

Legend: N tokens, D width, E experts, K experts of a token, M = N·K rows, one for each choice, in the order of the
experts; F their hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linear_cross_entropy import wide
from ..mlp import ACTIVATIONS, DERIVATIVES

#: Compute capabilities, by their first number, whose grouped product is one kernel; others get a loop that waits.
#: Torch has had the product since 2.10.
_ONE_KERNEL = (9, 10)

#: Elements of bf16 in 16 bytes: the kernel reads rows that begin at multiples of them.
_ALIGNED = 8


def is_fast(x_ND: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return True if the device has one kernel for grouped products of these tensors."""
    return (
        x_ND.device.type == "cuda"
        and hasattr(F, "grouped_mm")
        and x_ND.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x_ND.device)[0] in _ONE_KERNEL
        and all(size % _ALIGNED == 0 for size in weights[0].shape)
    )


def _stacked(tensors: Sequence[Tensor], n_experts: int, dtype: torch.dtype) -> list[Tensor]:
    """Stack tensors, listed map by map, over all experts, ``[E, …]``, in the dtype of the products."""
    stacks = []
    for first in range(0, len(tensors), n_experts):
        own = list(tensors[first : first + n_experts])
        stacks.append(own[0].new_empty(n_experts, *own[0].shape, dtype=dtype))
        torch._foreach_copy_(stacks[-1].unbind(), own)
    return stacks


def _unstacked(stacks: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``_stacked``: return separate tensors in their own dtype."""
    found = [torch.empty_like(one) for one in like]
    if found:
        torch._foreach_copy_(found, [part for stack in stacks for part in stack.unbind()])
    return found


def inverse(order_M: Tensor) -> Tensor:
    """Return the new index of each reordered row."""
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


def _by_token(y_MD: Tensor, inverse_M: Tensor, n_choices: int) -> Tensor:
    """Sum the rows of each token, ``[N, D]``."""
    y_NKD = y_MD[inverse_M].unflatten(0, (-1, n_choices))
    return y_NKD.sum(1, dtype=wide(y_MD.dtype)).to(y_MD.dtype)


def _ends(count_E: Tensor) -> Tensor:
    """Return the index behind each expert's last row."""
    return count_E.cumsum(0).to(torch.int32)


def forward(
    x_ND: Tensor,
    weight_NK: Tensor,
    chosen_NK: Tensor,
    count_E: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute outputs ``[N, D]``; return with them the products of gates and maps, ``[M, F]``, if kept, and the rows'
    order.
    """
    act, n_experts, n_choices = ACTIVATIONS[activation], len(count_E), weight_NK.shape[1]
    *into, down_EDF = _stacked(weights, n_experts, x_ND.dtype)
    bias_stacks = _stacked(biases, n_experts, x_ND.dtype)
    order_M = chosen_NK.flatten().argsort(stable=True)
    expert_M, weight_M1 = chosen_NK.flatten()[order_M], weight_NK.flatten()[order_M][:, None]
    x_MD, end_E = x_ND[order_M // n_choices], _ends(count_E)
    products = [F.grouped_mm(x_MD, map_EFD.transpose(1, 2), offs=end_E) for map_EFD in into]
    for product_MF, bias_EF in zip(products, bias_stacks, strict=False):
        product_MF += bias_EF[expert_M]
    *gates, up_MF = products
    a_MF = act(gates[0]) * up_MF if gates else act(up_MF)
    y_MD = F.grouped_mm(a_MF * weight_M1, down_EDF.transpose(1, 2), offs=end_E)
    if bias_stacks:
        y_MD += weight_M1 * bias_stacks[-1][expert_M]
    nothing = [up_MF.new_empty(0, up_MF.shape[1]) for _ in range(2)]
    kept = [gates[0] if gates and keep else nothing[0], up_MF if keep else nothing[1]]
    return _by_token(y_MD, inverse(order_M), n_choices), kept[0], kept[1], order_M


def backward(
    d_ND: Tensor,
    x_ND: Tensor,
    weight_NK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    gates_MF: Tensor,
    ups_MF: Tensor,
    order_M: Tensor,
    count_E: Tensor,
    activation: str,
    trains: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Compute gradients of tokens, of their experts' weights in the sum, and of maps and biases if they train."""
    act, derivative = ACTIVATIONS[activation], DERIVATIVES[activation]
    n_experts, n_choices = len(count_E), weight_NK.shape[1]
    *into, down_EDF = _stacked(weights, n_experts, x_ND.dtype)
    token_M, weight_M1, end_E = order_M // n_choices, weight_NK.flatten()[order_M][:, None], _ends(count_E)
    expert_M = torch.arange(n_experts, device=count_E.device).repeat_interleave(count_E, output_size=len(order_M))
    d_MD, x_MD = d_ND[token_M], x_ND[token_M]
    is_gated = len(into) == 2
    acted_MF = act(gates_MF if is_gated else ups_MF)
    a_MF = acted_MF * ups_MF if is_gated else acted_MF
    da_MF = F.grouped_mm(d_MD, down_EDF, offs=end_E)
    d_weight_M = (da_MF * a_MF).sum(-1)
    if biases:
        down_bias_ED = _stacked(biases[-n_experts:], n_experts, x_ND.dtype)[0]
        d_weight_M += (d_MD * down_bias_ED[expert_M]).sum(-1)
    da_MF *= weight_M1
    d_products = [derivative(da_MF * ups_MF, gates_MF), da_MF * acted_MF] if is_gated else [derivative(da_MF, ups_MF)]
    dx_MD = F.grouped_mm(d_products[0], into[0], offs=end_E)
    for d_MF, map_EFD in zip(d_products[1:], into[1:], strict=True):
        dx_MD += F.grouped_mm(d_MF, map_EFD, offs=end_E)
    inverse_M = inverse(order_M)
    d_weight_NK = d_weight_M[inverse_M].view_as(weight_NK)
    d_weights: list[Tensor] = []
    d_biases: list[Tensor] = []
    if trains:
        pairs = [*((d_MF, x_MD) for d_MF in d_products), (d_MD, a_MF * weight_M1)]
        # Kernels of some devices leave old memory where an expert has no rows.
        has_rows_E11 = (count_E > 0)[:, None, None]
        found = [F.grouped_mm(d.T, rows, offs=end_E).where(has_rows_E11, 0) for d, rows in pairs]
        d_weights = _unstacked(found, weights)
        if biases:
            sums = [*d_products, d_MD * weight_M1]
            d_biases = _unstacked([_sum_by_expert(rows, expert_M, n_experts) for rows in sums], biases)
    return _by_token(dx_MD, inverse_M, n_choices), d_weight_NK, d_weights, d_biases


def _sum_by_expert(rows_MI: Tensor, expert_M: Tensor, n_experts: int) -> Tensor:
    """Sum rows by expert, ``[E, I]``, as a matrix product, which adds in the same order each time."""
    is_of_EM = (expert_M == torch.arange(n_experts, device=expert_M.device)[:, None]).to(rows_MI.dtype)
    return is_of_EM @ rows_MI
