"""Cost of each arm of attention over plain softmax: one attention, forward alone and with its backward pass.

Also the cost of mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attention_cost import ARMS, layer_step
from device import in_turn
from libraries import Shape, model_fields
from record import FAILED

from birthmark.models.attention.kernel_choice import explicit_because
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

from ..case import Case, Setting, breaks_device, one_line
from . import mixtures

#: Times plain softmax that an arm on a fused kernel may take, from this length on.
DEARER, FROM = 1.10, 2048
LENGTHS, HEADS, WIDTH = (4096, 2048, 8192, 1024), (128, 64), 2048
#: Tokens of a batch.
TOKENS = 16384


def _arms(seq_len: int, d_head: int, width: int, tokens: int, setting: Setting) -> Iterator[dict[str, Any]]:
    device, batch = torch.device(setting.device), max(tokens // seq_len, 1)
    shape = Shape(width, 1, width // d_head, 0, 64, 64, seq_len, batch)
    steps: dict[str, dict[str, Callable[[], float]]] = {}
    fused = {}
    for name, (fields, _) in ARMS.items():
        config = ModelConfig(**{**model_fields(shape), **fields})
        fused[name] = explicit_because(config) is None
        try:
            model = born(config, 0, device).train()
            passes = {
                way: layer_step(model, shape, True, False, device.type, way != "forward")
                for way in ("forward", "forward and backward")
            }
            for step in passes.values():
                step()
        except Exception as error:
            yield {"table": "Arms that failed", "arm": name, "status": FAILED, "note": one_line(error)}
            if breaks_device(error) or name == next(iter(ARMS)):
                raise
            continue
        for way, step in passes.items():
            steps.setdefault(way, {})[name] = step
    for way, arms in steps.items():
        for name, found in in_turn(arms, device, setting.rounds, 1).items():
            limited = fused[name] and name != "plain" and seq_len >= FROM
            yield {
                "table": f"One attention, {way}, bf16, {batch} × {seq_len} tokens, width {width}, heads of {d_head}",
                "arm": name,
                "ms": 1000 * found.seconds,
                "× plain": found.ratio,
                "quartiles": f"{found.low:.3f}–{found.high:.3f}",
                **(setting.limit(found.ratio, DEARER, at_most=True) if limited else {}),
            }


def cases(setting: Setting) -> list[Case]:
    """Return a case for every length with both head widths, then the mixtures."""
    if setting.tiny:
        return [Case("T 128, heads of 8", partial(_arms, 128, 8, 16, 128)), *mixtures.cases(setting)]
    return [
        *(
            Case(f"T {seq_len}, heads of {d_head}", partial(_arms, seq_len, d_head, WIDTH, TOKENS), 45)
            for d_head in HEADS
            for seq_len in LENGTHS
        ),
        *mixtures.cases(setting),
    ]
