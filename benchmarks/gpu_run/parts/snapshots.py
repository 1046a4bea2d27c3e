"""Cost of a snapshot over the plain forward pass of its probe (``snapshot_cost.py``), and over training on as much;
attention weights by blocks, as by default, and by walks (``snapshot.attention_weights``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from device import Peak, in_turn, release
from snapshot_cost import Shape, passes

from birthmark.measure.passes import sequences_of_pass
from birthmark.models.attention.fused import weight_sums
from birthmark.models.birth import born

from ..case import Case, Setting, breaks_device, one_line
from ..models import LLAMA_1B, LLAMA_134M, TINY, Sized
from .profile import training_step

#: A snapshot's time over the plain pass's.
DEARER = 1.2


def _cost(sized: Sized, n_sequences: int, seq_len: int, setting: Setting) -> Iterator[dict[str, Any]]:
    # At most 4,096 positions: the default probe is read by a model that is trained on more.
    config = sized.config(max(seq_len, 16 if setting.tiny else 1024))
    batch = sequences_of_pass(None, seq_len, config.ff, on_gpu=torch.device(setting.device).type == "cuda")
    shape = Shape(config, n_sequences, seq_len, min(batch, n_sequences))
    step, n_trained = training_step(sized, "no", setting)
    trains = in_turn({"step": step}, setting.device, setting.rounds, 3)["step"].seconds / n_trained
    del step
    release(setting.device)
    model = born(config, 0, setting.device)
    timed = passes(shape, model)
    why_not = weight_sums.why_not(torch.device(setting.device).type)
    if not why_not:
        by_walk = passes(shape, model, attention_weights="walk")["snapshot"]
        try:
            by_walk()
            timed["by walk"] = by_walk
        except Exception as error:  # the way by default is timed all the same
            why_not = one_line(error)
            if breaks_device(error):
                raise
    found = in_turn(timed, setting.device, setting.rounds, 2)
    held = {}
    for name, function in timed.items():
        peak = Peak(setting.device)
        peak.start()
        function()
        held[name] = peak.above()
    snapshot, walk = found["snapshot"], found.get("by walk")
    yield {
        "table": "Snapshot over the plain pass of its probe, float32",
        "probe": f"{n_sequences} × {seq_len}, {shape.batch_size} at once",
        "forward, ms": 1000 * found["forward"].seconds,
        "snapshot, ms": 1000 * snapshot.seconds,
        "ratio": snapshot.ratio,
        "quartiles": f"{snapshot.low:.3f}–{snapshot.high:.3f}",
        "by walk, ms": None if walk is None else 1000 * walk.seconds,
        "by walk, ratio": None if walk is None else walk.ratio,
        "over training on as many tokens": snapshot.seconds / (trains * n_sequences * seq_len),
        **{f"{name} above rest, MiB": None if n is None else n / 2**20 for name, n in held.items()},
        **setting.limit(snapshot.ratio, DEARER, at_most=True),
        **({"note": f"no walk: {why_not}"} if why_not else {}),
    }


def cases(setting: Setting) -> list[Case]:
    """Return the cases of two models, at the default probe and at two lengths."""
    if setting.tiny:
        return [Case("tiny, T 16", partial(_cost, TINY, 4, 16))]
    return [
        Case(f"{sized.name}, {name}", partial(_cost, sized, n, seq_len), 30)
        for sized in (LLAMA_134M, LLAMA_1B)
        for name, seq_len, n in (("default probe", 64, 256), ("T 1024", 1024, 64), ("T 4096", 4096, 16))
    ]
