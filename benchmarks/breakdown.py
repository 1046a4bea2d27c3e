"""Shares of operators in the time of one of our training steps, against the speed that matrix products reach here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from peers import Loss, Shape, timed_step
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

LINEAR, HEAD, ATTENTION, LOSS = "linear maps of the blocks", "output head", "attention kernel", "cross-entropy"
CASTS, ELEMENTWISE, REST = "casts and copies", "norms, rotary, activations, sums", "everything else"


class Part(NamedTuple):
    """One share of a step."""

    name: str
    seconds: float
    share: float
    flops: float
    """Floating-point operations of its matrix products; 0 where it has none."""


def product_ceiling(shape: Shape, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Measure FLOP/s of plain ``torch.mm`` at the products of the model, by (rows, inner, columns); medians."""
    n, d, ff, vocab = shape.seq_len * shape.micro_batch, shape.d_model, shape.d_ff, shape.vocab_size
    sizes = [(n, d, d), (n, d, ff), (n, ff, d), (d, n, d), (ff, n, d), (n, d, vocab), (n, vocab, d), (vocab, n, d)]
    reached = {}
    for m, k, columns in sizes:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, columns, dtype=dtype)
        out = torch.empty(m, columns, dtype=dtype)
        seconds = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            seconds.append(time.perf_counter() - start)
        reached[f"{m} × {k} × {columns}"] = 2 * m * k * columns / float(np.median(seconds[2:]))
    return reached


def products_of_step(shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs only the matrix products of one training step: the output and both gradients of each
    linear map.

    No implementation of a step can be faster. Attention's products are not included.
    """
    n, d, ff, vocab = shape.seq_len * shape.micro_batch, shape.d_model, shape.d_ff, shape.vocab_size
    kv = d // shape.n_heads * (shape.n_kv_heads or shape.n_heads)
    up = 1 if shape.gpt2 else 2  # a gate
    maps = [(d, d), (d, kv), (d, kv), (d, d), *[(d, ff)] * up, (ff, d)] * shape.n_layers + [(d, vocab)]
    # A weight of its own for each map: a step reads them all.
    weights = [torch.randn(out, inner, dtype=dtype) for inner, out in maps]
    rows = {width: torch.randn(n, width, dtype=dtype) for width in {d, kv, ff, vocab}}
    into = {width: torch.empty(n, width, dtype=dtype) for width in rows}
    gradients = {size: torch.empty(size, dtype=dtype) for size in {weight.shape for weight in weights}}

    def products() -> None:
        for weight in weights:
            out, inner = weight.shape
            torch.mm(rows[inner], weight.T, out=into[out])
            torch.mm(rows[out], weight, out=into[inner])
            torch.mm(rows[out].T, rows[inner], out=gradients[weight.shape])

    return products


def _is(event: Any, *parts: str) -> bool:
    return any(part in event.key for part in parts)


def _part(event: Any, shape: Shape) -> str:
    sizes = [tuple(size) for size in event.input_shapes if size]
    of_logits = any(size[-1] == shape.vocab_size and shape.d_model not in size for size in sizes)
    of_logits = of_logits or any(shape.vocab_size in size[1:-1] for size in sizes)
    if _is(event, "flash_attention"):
        return ATTENTION
    if event.key in ("aten::mm", "aten::addmm", "aten::bmm"):
        return HEAD if any(shape.vocab_size in size for size in sizes) else LINEAR
    if of_logits or _is(event, "log_softmax", "nll_loss"):
        return LOSS
    if event.key in ("aten::copy_", "aten::_to_copy", "aten::to", "aten::clone", "aten::cat"):
        return CASTS
    if _is(event, "mul", "add", "sub", "neg", "div", "silu", "rms_norm", "pow", "mean", "rsqrt", "sum", "sqrt"):
        return ELEMENTWISE
    return REST


def _flops(event: Any) -> float:
    if event.key not in ("aten::mm", "aten::bmm"):
        return 0.0
    a, b = event.input_shapes[:2]
    return 2.0 * np.prod(a) * b[-1] * event.count


def breakdown(model: nn.Module, loss: Loss, batch: Tensor, shape: Shape, bf16: bool, steps: int) -> list[Part]:
    """Sum the self times of a step's operators into parts, largest first; the mean over ``steps``."""
    timed_step(model, loss, batch, bf16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(steps):
            timed_step(model, loss, batch, bf16)
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages(group_by_input_shape=True):
        part = _part(event, shape)
        seconds[part] += event.self_cpu_time_total / 1e6 / steps
        flops[part] += _flops(event) / steps
    # Fused causal attention: two products forward, five backward, over half of the matrix.
    flops[ATTENTION] = 7 * shape.micro_batch * shape.d_model * shape.seq_len**2 * shape.n_layers
    total = sum(seconds.values())
    parts = [Part(name, value, value / total, flops[name]) for name, value in seconds.items()]
    return sorted(parts, key=lambda part: -part.seconds)
