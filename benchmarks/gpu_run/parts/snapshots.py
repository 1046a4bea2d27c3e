"""Cost of a snapshot over the plain forward pass of its probe (``snapshot_cost.py``), and over training on as much;
attention weights by blocks, as by default, and by walks (``snapshot.attention_weights``). Eigenvalues alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from device import Peak, in_turn, release
from libraries import drawn
from snapshot_cost import Shape, passes

from birthmark.kernel_devices import runs_triton
from birthmark.measure.passes import sequences_of_pass
from birthmark.metrics.dominance import each_at_once, symmetric_eigenvalues
from birthmark.models.attention.fused import weight_sums

from ..case import Case, Setting, breaks_device, one_line
from ..models import LLAMA_1B, LLAMA_134M, TINY, Sized
from .profile import training_step

#: A snapshot's time over the plain pass's.
DEARER = 1.2
#: Matrices that are solved at once on streams of a GPU, at most.
_ON_STREAMS = 8


def _cost(sized: Sized, n_sequences: int, seq_len: int, setting: Setting) -> Iterator[dict[str, Any]]:
    # At most 4,096 positions: the default probe is read by a model that is trained on more.
    config = sized.config(max(seq_len, 16 if setting.tiny else 1024))
    batch = sequences_of_pass(None, seq_len, config.ff, on_gpu=torch.device(setting.device).type == "cuda")
    shape = Shape(config, n_sequences, seq_len, min(batch, n_sequences))
    step, n_trained = training_step(sized, "no", setting)
    trains = in_turn({"step": step}, setting.device, setting.rounds, 3)["step"].seconds / n_trained
    del step
    release(setting.device)
    model = drawn(config, setting.device)
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


def _eigenvalues(sized: Sized, setting: Setting) -> Iterator[dict[str, Any]]:
    """Time the eigenvalues of all places without a pass beside them: on streams, as snapshots solve them; one by one;
    by one call, for which torch has another solver from 2.12 on (its pull request 175403); on the host's cores; and by
    one program for each matrix, which leaves most of the GPU to a pass.
    """
    config = sized.config(16)
    n_places, width = config.n_layers + 1, config.d_model
    x = torch.randn(n_places, 4 * width, width, dtype=torch.float64, device=setting.device)
    moments = x.mT @ x
    del x
    ways = {
        "on streams": lambda: each_at_once(symmetric_eigenvalues, moments, _ON_STREAMS),
        "one by one": lambda: [symmetric_eigenvalues(moment) for moment in moments],
        "by one call": lambda: torch.linalg.eigvalsh(moments),
        "on the host": lambda: each_at_once(symmetric_eigenvalues, moments.cpu(), _ON_STREAMS),
    }
    if runs_triton(moments):
        from ..eigenvalues_kernel import eigenvalues

        ways["by one program each"] = lambda: each_at_once(eigenvalues, moments, _ON_STREAMS)
    wanted = torch.stack(ways["on streams"]())
    for name, found in in_turn(ways, setting.device, setting.rounds, 1).items():
        off = (torch.stack(tuple(ways[name]())).to(wanted.device) - wanted).abs().max()
        yield {
            "table": "Eigenvalues of a snapshot's second moments, float64",
            "matrices": f"{n_places} × {width}",
            "way": name,
            "ms": 1000 * found.seconds,
            "ratio": found.ratio,
            "quartiles": f"{found.low:.3f}–{found.high:.3f}",
            "largest difference": float(off / wanted.max()),
        }


def cases(setting: Setting) -> list[Case]:
    """Return the cases of two models: the default probe and two lengths, and eigenvalues alone."""
    sizes: tuple[Sized, ...] = (LLAMA_134M, LLAMA_1B)
    probes: tuple[tuple[str, int, int], ...] = (("default probe", 64, 256), ("T 1024", 1024, 64), ("T 4096", 4096, 16))
    if setting.tiny:
        sizes, probes = (TINY,), (("T 16", 16, 4),)
    found = []
    for sized in sizes:
        for name, seq_len, n in probes:
            found.append(Case(f"{sized.name}, {name}", partial(_cost, sized, n, seq_len)))
        found.append(Case(f"{sized.name}, eigenvalues", partial(_eigenvalues, sized)))
    return found
