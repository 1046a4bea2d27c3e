"""Cost of a mixture of experts over a dense MLP with as many multiplications: all experts at once, and one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from device import in_turn
from libraries import drawn
from torch import Tensor, nn

from birthmark.models.config import ExpertsConfig, ModelConfig
from birthmark.models.experts import fused_experts

from ..case import Case, Setting

#: Experts, and how many of them a token passes: few wide ones as in Mixtral, many narrow ones as in OLMoE.
MIXTURES = ((8, 2), (64, 8))


def _mlp(d_model: int, d_ff: int, experts: ExpertsConfig, device: str) -> nn.Module:
    sizes = {"n_layers": 1, "n_heads": d_model // 64 or 1, "vocab_size": 64, "max_seq_len": 64}
    config = ModelConfig(d_model=d_model, d_ff=d_ff, mlp="swiglu", experts=experts, **sizes)
    return drawn(config, device).train().blocks[0].mlp


def _step(mlp: nn.Module, x_BTD: Tensor, device: str, all_at_once: bool) -> Callable[[], None]:
    d_BTD = torch.randn_like(x_BTD)

    def step() -> None:
        one_by_one = contextlib.nullcontext() if all_at_once else patch.object(fused_experts, "is_fast", _never)
        with one_by_one:
            with torch.autocast(device, torch.bfloat16):
                y_BTD = mlp(x_BTD)
            y_BTD.backward(d_BTD.to(y_BTD.dtype))
        mlp.zero_grad(set_to_none=True)
        x_BTD.grad = None

    return step


def _never(*_: Any) -> bool:
    return False


def _mixture(n: int, top_k: int, d_model: int, d_ff: int, n_tokens: int, setting: Setting) -> Iterator[dict[str, Any]]:
    device = torch.device(setting.device)
    x_BTD = torch.randn(1, n_tokens, d_model, device=device, requires_grad=True)
    dense = _mlp(d_model, d_ff, ExpertsConfig(), device.type)
    mixture = _mlp(d_model, d_ff, ExpertsConfig(n_experts=n, top_k=top_k, d_ff=d_ff // top_k), device.type)
    steps = {
        "dense": _step(dense, x_BTD, device.type, True),
        "experts": _step(mixture, x_BTD, device.type, True),
        "experts one by one": _step(mixture, x_BTD, device.type, False),
    }
    for name, found in in_turn(steps, device, setting.rounds, 2).items():
        yield {
            "table": f"One MLP, forward and backward, bf16, {n_tokens} tokens, width {d_model}, hidden {d_ff}",
            "MLP": name if name == "dense" else f"{name}: {n}, {top_k} of a token",
            "ms": 1000 * found.seconds,
            "× dense": found.ratio,
            "quartiles": f"{found.low:.3f}–{found.high:.3f}",
        }


def cases(setting: Setting) -> list[Case]:
    """Return a case for every mixture, at the width of a model of 1B."""
    sizes = (16, 16, 64) if setting.tiny else (2048, 5632, 16384)
    return [
        Case(f"{n} experts, {top_k} of a token", partial(_mixture, n, top_k, *sizes), 40)
        for n, top_k in (MIXTURES[:1] if setting.tiny else MIXTURES)
    ]
