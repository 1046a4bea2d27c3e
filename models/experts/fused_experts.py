"""The experts of a mixture as one operator, forwards and backwards, and as grouped products for GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from ..activations import ACTIVATIONS, DERIVATIVES
from ..linear_cross_entropy import wide
from ..mlp import MLP

# ---------------------------------------------------------------- grouped products

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


# ---------------------------------------------------------------- one operator


def fused_experts(
    experts: nn.ModuleList, x_ND: Tensor, weight_NK: Tensor, chosen_NK: Tensor, count_E: Tensor
) -> Tensor | None:
    """Compute ``Σ_k weight_k · expert_k(x)`` for each token, ``[N, D]``, in the dtype of the maps' products;
    ``count_E`` counts the choices of each expert.

    Returns None if a map needs more than its plain product: it has an adapter or hooks, or multiplies in fp8.
    """
    mlps = [cast(MLP, expert) for expert in experts]
    if not all(_is_plain(mlp) for mlp in mlps):
        return None
    device, dtype = x_ND.device.type, x_ND.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    gates = [mlp.gate for mlp in mlps if mlp.gate is not None]
    maps = [*gates, *(mlp.up for mlp in mlps), *(mlp.down for mlp in mlps)]
    y_ND, *_ = _forward(
        x_ND.to(dtype),
        weight_NK.to(dtype),
        chosen_NK,
        count_E,
        [one.weight for one in maps],
        [one.bias for one in maps if one.bias is not None],
        mlps[0].activation,
        torch.is_grad_enabled(),
    )
    return cast(Tensor, y_ND)


def _is_plain(mlp: MLP) -> bool:
    """Return True if an expert consists of its maps' weights, biases and activation only."""
    maps = [module for module in (mlp.gate, mlp.up, mlp.down) if module is not None]
    return not any(_has_hooks(module) for module in (mlp, *maps)) and all(
        one.adapter is None and "product" not in vars(one) for one in maps
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _Maps(NamedTuple):
    """Weights, or biases, of one expert."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


def _of_experts(tensors: Sequence[Tensor], n_experts: int, dtype: torch.dtype) -> Iterator[_Maps | None]:
    """Yield the tensors of each expert, in the dtype of the products, from tensors listed map by map; None for an empty
    list.
    """
    for e in range(n_experts):
        own = [tensor.to(dtype) for tensor in tensors[e::n_experts]]
        yield None if not own else _Maps(None if len(own) == 2 else own[0], *own[-2:])


def _rows(count_E: Tensor) -> Iterator[slice]:
    """Yield the rows of each expert, as slices of rows in the experts' order."""
    start = 0
    for count in count_E.tolist():
        yield slice(start, start + count)
        start += count


def _product(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_RO: Tensor) -> Tensor:
    if bias_O is None:
        return torch.mm(x_RI, weight_OI.T, out=out_RO)
    return torch.addmm(bias_O, x_RI, weight_OI.T, out=out_RO)


def _kept(x_ND: Tensor, weight_NK: Tensor, weights: Sequence[Tensor], n_experts: int, keep: bool) -> list[Tensor]:
    """Allocate the gates' and maps' products, ``[M, F]``; empty without gates, or if nothing is kept."""
    is_kept = (keep and len(weights) == 3 * n_experts, keep)
    return [x_ND.new_empty(weight_NK.numel() if one else 0, weights[-1].shape[1]) for one in is_kept]


@torch.library.custom_op("birthmark::experts", mutates_args=())
def _forward(
    x_ND: torch.Tensor,
    weight_NK: torch.Tensor,
    chosen_NK: torch.Tensor,
    count_E: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if is_fast(x_ND, weights):
        return forward(x_ND, weight_NK, chosen_NK, count_E, weights, biases, activation, keep)
    act, dtype, n_experts = ACTIVATIONS[activation], x_ND.dtype, len(count_E)
    gates_MF, ups_MF = _kept(x_ND, weight_NK, weights, n_experts, keep)
    order_M = chosen_NK.flatten().argsort(stable=True)
    token_M, weight_M1 = order_M // weight_NK.shape[1], weight_NK.flatten()[order_M][:, None]
    out_ND = torch.zeros_like(x_ND, dtype=wide(dtype))
    of_experts = zip(
        _rows(count_E), _of_experts(weights, n_experts, dtype), _of_experts(biases, n_experts, dtype), strict=True
    )
    for rows, weight, bias in of_experts:
        assert weight is not None
        token_R, weight_R1 = token_M[rows], weight_M1[rows]
        x_RD = x_ND.index_select(0, token_R)
        room_RF = ups_MF[rows] if keep else ups_MF.new_empty(len(token_R), ups_MF.shape[1])
        a_RF = _product(x_RD, weight.up, bias and bias.up, room_RF)
        if weight.gate is None:
            a_RF = act(a_RF)
        else:
            room_RF = gates_MF[rows] if keep else torch.empty_like(a_RF)
            a_RF = act(_product(x_RD, weight.gate, bias and bias.gate, room_RF)) * a_RF
        y_RD = torch.mm(a_RF * weight_R1, weight.down.T)
        if bias is not None:
            y_RD += weight_R1 * bias.down
        out_ND.index_add_(0, token_R, y_RD.to(out_ND.dtype))
    return out_ND.to(dtype), gates_MF, ups_MF, order_M


@_forward.register_fake
def _(
    x_ND: Tensor, weight_NK: Tensor, chosen_NK: Tensor, count_E: Tensor, weights: Sequence[Tensor],
    biases: Sequence[Tensor], activation: str, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    kept = _kept(x_ND, weight_NK, weights, len(count_E), keep)
    return torch.empty_like(x_ND), *kept, chosen_NK.new_empty(weight_NK.numel())


@torch.library.custom_op("birthmark::experts_backward", mutates_args=())
def _backward(
    d_ND: torch.Tensor,
    x_ND: torch.Tensor,
    weight_NK: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gates_MF: torch.Tensor,
    ups_MF: torch.Tensor,
    order_M: torch.Tensor,
    count_E: torch.Tensor,
    activation: str,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    if is_fast(x_ND, weights):
        kept = (gates_MF, ups_MF, order_M, count_E)
        return backward(d_ND, x_ND, weight_NK, weights, biases, *kept, activation, trains)
    act, derivative, dtype, n_experts = ACTIVATIONS[activation], DERIVATIVES[activation], x_ND.dtype, len(count_E)
    token_M, weight_M1 = order_M // weight_NK.shape[1], weight_NK.flatten()[order_M][:, None]
    dx_ND, d_weight_M = torch.zeros_like(x_ND, dtype=wide(dtype)), torch.empty_like(weight_NK).flatten()
    d_maps: list[list[Tensor]] = []
    of_experts = zip(
        _rows(count_E), _of_experts(weights, n_experts, dtype), _of_experts(biases, n_experts, dtype), strict=True
    )
    for rows, weight, bias in of_experts:
        assert weight is not None
        token_R, weight_R1, up_RF = token_M[rows], weight_M1[rows], ups_MF[rows]
        d_RD, x_RD = d_ND.index_select(0, token_R), x_ND.index_select(0, token_R)
        acted_RF = act(up_RF if weight.gate is None else gates_MF[rows])
        a_RF = acted_RF if weight.gate is None else acted_RF * up_RF
        da_RF = torch.mm(d_RD, weight.down)
        d_weight_R = (da_RF * a_RF).sum(-1)
        if bias is not None:
            d_weight_R += d_RD @ bias.down
        d_weight_M[order_M[rows]] = d_weight_R
        da_RF *= weight_R1
        if weight.gate is None:
            d_products = [derivative(da_RF, up_RF)]
            dx_RD = torch.mm(d_products[0], weight.up)
        else:
            d_products = [derivative(da_RF * up_RF, gates_MF[rows]), da_RF * acted_RF]
            dx_RD = torch.mm(d_products[0], weight.gate).addmm_(d_products[1], weight.up)
        dx_ND.index_add_(0, token_R, dx_RD.to(dx_ND.dtype))
        if trains:
            d_maps.append([*(d_RF.T @ x_RD for d_RF in d_products), d_RD.T @ (a_RF * weight_R1)])
            if bias is not None:
                d_maps[-1] += [*(d_RF.sum(0) for d_RF in d_products), (d_RD * weight_R1).sum(0)]
    # Map by map, as they came.
    in_order = [d for of_map in zip(*d_maps, strict=True) for d in of_map]
    d_all = [d.to(one.dtype) for d, one in zip(in_order, (*weights, *biases) if trains else (), strict=True)]
    d_weight_NK = d_weight_M.view_as(weight_NK)
    return dx_ND.to(dtype), d_weight_NK, d_all[: len(weights)], d_all[len(weights) :]


@_backward.register_fake
def _(
    d_ND: Tensor, x_ND: Tensor, weight_NK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
    gates_MF: Tensor, ups_MF: Tensor, order_M: Tensor, count_E: Tensor, activation: str, trains: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    d_weights, d_biases = ([torch.empty_like(one) for one in given if trains] for given in (weights, biases))
    return torch.empty_like(x_ND), torch.empty_like(weight_NK), d_weights, d_biases


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_ND, weight_NK, _, count_E, weights, biases, ctx.activation, _ = inputs
    ctx.n_weights = len(weights)
    ctx.trains = any(one.requires_grad for one in (*weights, *biases))
    ctx.save_for_backward(x_ND, weight_NK, *output[1:], count_E, *weights, *biases)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, d_ND: Tensor, *_: Tensor) -> tuple[Any, ...]:
    x_ND, weight_NK, gates_MF, ups_MF, order_M, count_E, *maps = ctx.saved_tensors
    weights, biases = maps[: ctx.n_weights], maps[ctx.n_weights :]
    kept = (gates_MF, ups_MF, order_M, count_E)
    # The gradient of a sum is one number seen from everywhere.
    dx_ND, d_weight_NK, *d_maps = _backward(
        d_ND.contiguous(), x_ND, weight_NK, weights, biases, *kept, ctx.activation, ctx.trains
    )
    d_weights, d_biases = d_maps if ctx.trains else ([None] * len(weights), [None] * len(biases))
    return dx_ND, d_weight_NK, None, None, d_weights, d_biases, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _flops(rows: Sequence[int], count: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    """Count the FLOPs of the products of all rows with the maps of one expert, from the shapes of tensors."""
    return 2 * prod(rows) * sum(map(prod, weights)) // count[0]


@register_flop_formula(torch.ops.birthmark.experts)
def _forward_flops(
    x: Sequence[int], weight: Sequence[int], chosen: Sequence[int], count: Sequence[int],
    weights: Sequence[Sequence[int]], *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count FLOPs for torch's counter, which does not look into an operator."""
    return _flops(chosen, count, weights)


@register_flop_formula(torch.ops.birthmark.experts_backward)
def _backward_flops(
    d: Sequence[int], x: Sequence[int], weight: Sequence[int], weights: Sequence[Sequence[int]],
    biases: Sequence[Sequence[int]], gates: Sequence[int], ups: Sequence[int], order: Sequence[int],
    count: Sequence[int], activation: str, trains: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count FLOPs of the products for inputs and, if maps train, for maps."""
    return (1 + trains) * _flops(order, count, weights)
