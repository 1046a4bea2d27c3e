"""Experts of a mixture as one operator, forwards and backwards, for the plain maps of training.

A GPU computes all experts at once (``grouped_experts.py``). Elsewhere the experts take turns on their rows, while these
are in the processor's caches: rows are gathered on use, again in the backward pass, and results are added in place.
Only the inputs of the activations are kept for the M rows, so that no copy of ``[M, D]`` is written. A compiler sees
one operator for any choice of the router.

Legend: N tokens, D width, E experts, K experts of a token, M = N·K rows, one for each choice; R rows of one expert, F
its hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ..linear_cross_entropy import wide
from ..mlp import ACTIVATIONS, DERIVATIVES, MLP
from . import grouped_experts


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
        mlps[0].activation_name,
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
    if grouped_experts.is_fast(x_ND, weights):
        return grouped_experts.forward(x_ND, weight_NK, chosen_NK, count_E, weights, biases, activation, keep)
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
    if grouped_experts.is_fast(x_ND, weights):
        kept = (gates_MF, ups_MF, order_M, count_E)
        return grouped_experts.backward(d_ND, x_ND, weight_NK, weights, biases, *kept, activation, trains)
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
