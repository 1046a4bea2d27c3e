"""What a snapshot costs over the plain forward pass of its probe, in time and in memory (``snapshot_cost.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from device import Peak, in_turn
from snapshot_cost import Shape, passes

from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

from ..case import Case, Setting
from ..models import LLAMA_1B, LLAMA_134M, TINY

#: A snapshot's time over the plain pass's.
DEARER = 1.25


def _cost(
    config: ModelConfig, n_sequences: int, seq_len: int, batch: int, setting: Setting
) -> Iterator[dict[str, Any]]:
    shape = Shape(config, n_sequences, seq_len, batch)
    model = born(config, 0, setting.device)
    both = passes(shape, model)
    found = in_turn(both, setting.device, setting.rounds, 2)
    held = {}
    for name, function in both.items():
        peak = Peak(setting.device)
        peak.start()
        function()
        held[name] = peak.above()
    snapshot = found["snapshot"]
    yield {
        "table": "Snapshot over the plain pass of its probe, float32",
        "probe": f"{n_sequences} × {seq_len}, {batch} at once",
        "forward, ms": 1000 * found["forward"].seconds,
        "snapshot, ms": 1000 * snapshot.seconds,
        "ratio": snapshot.ratio,
        "quartiles": f"{snapshot.low:.3f}–{snapshot.high:.3f}",
        **{f"{name} above rest, MiB": None if n is None else n / 2**20 for name, n in held.items()},
        **setting.limit(snapshot.ratio, DEARER, at_most=True),
    }


def cases(setting: Setting) -> list[Case]:
    """Two models at two lengths."""
    if setting.tiny:
        return [Case("tiny, T 16", partial(_cost, TINY.config(16), 4, 16, 2))]
    return [
        Case(f"{shape.name}, T {seq_len}", partial(_cost, shape.config(seq_len), n, seq_len, batch), 60)
        for shape in (LLAMA_134M, LLAMA_1B)
        for seq_len, n, batch in ((1024, 64, 16), (4096, 16, 4))
    ]
