"""Cost of each arm of attention over plain softmax: one attention, forward alone and with its backward pass.

Also the tiles of the kernel that sums squares in the same walk as the output, and the cost of mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from attention_cost import ARMS, layer_pass
from device import in_turn, replayed
from libraries import Shape, drawn, model_fields
from record import FAILED

from birthmark.kernel_devices import why_not_triton
from birthmark.models.attention.fused.kernels import attention_with_squares
from birthmark.models.attention.fused.one_walk import walk
from birthmark.models.attention.kernel_choice import explicit_because
from birthmark.models.config import ModelConfig

from ..case import Case, Setting, breaks_device, one_line
from . import mixtures

#: Times plain softmax that an arm on a fused kernel may take, and one with learned keys; from this length on.
DEARER, WITH_KEYS, FROM = 1.10, 1.05, 2048
LENGTHS, HEADS, WIDTH = (4096, 2048, 8192, 1024), (128, 64), 2048
#: Tokens of a batch.
TOKENS = 16384
#: Arms with their sums of squares from another attention's log-sum-exp, beside the same arms by default.
SEPARATE = {
    f"{name}, two attentions": {
        **ARMS[name][0],
        "attention": replace(
            ARMS[name][0]["attention"],
            calibration=replace(ARMS[name][0]["attention"].calibration, squares="separate"),
        ),
    }
    for name in ("calibrated-exact", "calibrated-estimated")
}
#: Arms that are compiled too.
COMPILED = ("plain", "headnorm", "calibrated-exact", "calibrated-exact, two attentions", "key-value-bias")
#: Queries, keys, warps and stages of other tiles of that kernel, by the name of its part.
OTHER_TILES = {
    "forward": [
        *[(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4)],
        *[(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4)],
    ],
    "keys": [
        *[(64, 128, 8, 3), (64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)],
        *[(64, 32, 4, 3), (32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 4)],
    ],
    "queries": [
        *[(128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4), (64, 128, 4, 2)],
        *[(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4)],
    ],
}


def _arms(
    seq_len: int, d_head: int, width: int, tokens: int, setting: Setting, compiled: bool = False
) -> Iterator[dict[str, Any]]:
    device, batch = torch.device(setting.device), max(tokens // seq_len, 1)
    shape = Shape(width, 1, width // d_head, 0, 64, 64, seq_len, batch)
    steps: dict[str, dict[str, Callable[[], object]]] = {}
    launched: dict[str, dict[str, Callable[[], object]]] = {}
    limits: dict[str, float | None] = {}
    why_not = why_not_triton(device.type)
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name, fields in {**{name: fields for name, (fields, _) in ARMS.items()}, **SEPARATE}.items():
        if compiled and name not in COMPILED:
            continue
        config = ModelConfig(**{**model_fields(shape), **fields})
        limited = name != "plain" and explicit_because(config) is None and seq_len >= FROM
        limits[name] = (DEARER if config.attention.kv_bias == "none" else WITH_KEYS) if limited else None
        try:
            model = drawn(config, device).train()
            for way in ("forward", "forward and backward"):
                run = layer_pass(model, shape, True, compiled, device.type, way != "forward")
                run()
                launched.setdefault(way, {})[name] = run
                steps.setdefault(way, {})[name] = replayed(run, device, pool)
        except Exception as error:
            yield {"table": "Arms that failed", "arm": name, "status": FAILED, "note": one_line(error)}
            if breaks_device(error) or name == next(iter(ARMS)):
                raise
            continue
    sizes = f"{batch} × {seq_len} tokens, width {width}, heads of {d_head}"
    how = ", compiled" if compiled else ""
    for way, arms in steps.items():
        by_host = in_turn(launched[way], device, 3, 1)
        for name, found in in_turn(arms, device, setting.rounds, 1).items():
            limit = limits[name]
            yield {
                "table": f"One attention, {way}{how}, bf16, {sizes}",
                "arm": name,
                "ms": 1000 * found.seconds,
                "× plain": found.ratio,
                "quartiles": f"{found.low:.3f}–{found.high:.3f}",
                "launched one by one, ms": 1000 * by_host[name].seconds,
                **({} if limit is None else setting.limit(found.ratio, limit, at_most=True)),
                **({"note": f"by two attentions: {why_not}"} if why_not and "calibrated-e" in name else {}),
            }


def _tiles(seq_len: int, d_head: int, width: int, tokens: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Time the kernel of one walk alone, bf16, by its tiles: a part at a time, the others as they are; and beside it
    what it would replace.
    """
    device, n_heads = torch.device(setting.device), width // d_head
    table = f"Attention with Σa² alone, bf16, {tokens} tokens, T {seq_len}, {n_heads} heads of {d_head}"
    if why_not := why_not_triton(device.type):
        yield {"table": table, "tiles": "all", "note": f"not run: {why_not}"}
        return
    from birthmark.models.attention.fused import one_walk_kernel

    shape = max(tokens // seq_len, 1), seq_len, n_heads, d_head
    q, k, v, d_out = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(4)
    )
    d_sums, usual = torch.randn(q.shape[:3], device=device), one_walk_kernel.TILES
    pool = torch.cuda.graph_pool_handle()

    def step(tiles: dict[str, Any] | None) -> Callable[[], object]:
        def run() -> None:
            one_walk_kernel.TILES = tiles or usual
            try:
                attend = attention_with_squares if tiles is None else walk
                out, lse, squares = attend(q, k, v, d_head**-0.5)
                torch.autograd.grad([out, lse, squares], [q, k, v], [d_out, d_sums, d_sums])
            finally:
                one_walk_kernel.TILES = usual

        return replayed(run, device, pool)

    for part, others in OTHER_TILES.items():
        steps = {"another attention": step(None), "as they are": step(usual)}
        for sizes in others:
            try:
                tiles = step({**usual, part: (one_walk_kernel.Tile(*sizes),) * 3})
            except Exception as error:  # tiles may ask for more shared memory than the card has
                yield {"table": table, "part": part, "tiles": str(sizes), "status": FAILED, "note": one_line(error)}
                if breaks_device(error):
                    raise
                continue
            steps[str(sizes)] = tiles
        for name, found in in_turn(steps, device, setting.rounds, 1).items():
            yield {"table": table, "part": part, "tiles": name, "ms": 1000 * found.seconds, "× first": found.ratio}


def cases(setting: Setting) -> list[Case]:
    """Return a case for every length with both head widths, then the mixtures."""
    if setting.tiny:
        sizes = (128, 8, 16, 128)
        tiny = [Case("T 128, heads of 8", partial(_arms, *sizes)), Case("tiles", partial(_tiles, *sizes))]
        return [*tiny, *mixtures.cases(setting)]
    return [
        *(
            Case(f"T {seq_len}, heads of {d_head}", partial(_arms, seq_len, d_head, WIDTH, TOKENS), 45)
            for d_head in HEADS
            for seq_len in LENGTHS
        ),
        Case("compiled, T 2048, heads of 128", partial(_arms, 2048, 128, WIDTH, TOKENS, compiled=True), 120),
        *(Case(f"tiles, heads of {d_head}", partial(_tiles, 2048, d_head, WIDTH, TOKENS), 90) for d_head in HEADS),
        *mixtures.cases(setting),
    ]
