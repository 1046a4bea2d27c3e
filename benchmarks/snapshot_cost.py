"""Cost of a bias snapshot, in time and in memory, against the plain forward pass over the same probe.

    python benchmarks/snapshot_cost.py [--repeats 15] [--shapes demo,134M] [--parts]

The peer is the cheapest forward pass that reaches the same logits: fused attention, last position only, no gradients.
Both keep what they free, as runs and commands do (``trainer/devices.py``).

*Time*: both run in one process, in turn, A B A B …. The result is the median of the pairwise ratios, because machines
are noisy. Every round does so on the probe and on one of twice as many sequences. The difference separates what a
snapshot does once (eigenvalues, ranks, states) from what it does per sequence. *Memory*: the highest resident size,
each in a process of its own (Linux only). *Parts*: sink anatomy and outliers, each by the seconds in its own
methods during the snapshot: what it makes the rest dearer by. (Two snapshots, with and without, differ by less than two
of the same kind do on a shared machine.)
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from device import seconds
from rich.console import Console
from rich.table import Table

from birthmark.data.probes import random_probe
from birthmark.measure.config import AttentionWeights
from birthmark.measure.measurement import BirthReference, evaluation_mode, measure
from birthmark.metrics.sinks import KeySummer
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.trainer.devices import keep_freed_memory

_134M = ModelConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=32000, max_seq_len=4096, mlp="swiglu")


class Shape(NamedTuple):
    """A model with the probe that it is measured on."""

    config: ModelConfig
    n_sequences: int
    seq_len: int
    batch_size: int


SHAPES = {
    "demo (d 192, L 4, V 4096)": Shape(ModelConfig(d_model=192, n_layers=4), 256, 64, 64),
    "facts (d 128, L 4, V 1024)": Shape(ModelConfig(d_model=128, vocab_size=1024), 256, 32, 64),
    "8M (d 256, L 6, V 4096)": Shape(ModelConfig(n_layers=6), 64, 256, 32),
    "134M (d 768, L 12, V 32000), T 256": Shape(_134M, 8, 256, 4),
    "134M, T 1024": Shape(_134M, 4, 1024, 2),
    "134M, T 4096": Shape(_134M, 2, 4096, 1),
}
PASSES = ("forward", "snapshot")


def passes(
    shape: Shape, model: Decoder, times: int = 1, attention_weights: AttentionWeights = "blocks"
) -> dict[str, Callable[[], object]]:
    """Return the plain pass and the snapshot over a probe of ``times`` as many sequences, with attention weights read
    this way.
    """
    probe = random_probe(shape.config.vocab_size, times * shape.n_sequences, shape.seq_len, 0)
    # The cost of a comparison with births does not depend on their values.
    n_places, width = shape.config.n_layers + 1, shape.config.d_model
    direction = np.full((n_places, width), width**-0.5)
    birth = BirthReference(direction, np.random.default_rng(0).dirichlet(np.ones(shape.config.vocab_size)))

    device = next(model.parameters()).device

    def forward() -> None:
        with evaluation_mode(model):
            for tokens in torch.from_numpy(probe).split(shape.batch_size):
                model(tokens.to(device), last_only=True)

    def snapshot() -> None:
        size = shape.batch_size
        measure(model, probe, birth, [birth, birth], batch_size=size, attention_weights=attention_weights)

    return dict(zip(PASSES, (forward, snapshot), strict=True))


#: The metrics of a part.
METRICS_OF = {
    "anatomy": ("heads:KeyValueNorms", "heads:HeadEntropy", "heads:SequenceSinks"),
    "outliers": ("activation_outliers:ActivationOutliers",),
}
#: Methods that do a part's work beside those of its metrics.
ELSEWHERE = {"anatomy": [(KeySummer, "read_scores"), (KeySummer, "_add_entropy")], "outliers": []}


def methods_of(part: str) -> list[tuple[type, str]]:
    """List the classes and methods that do the work of one part only."""
    found = list(ELSEWHERE[part])
    for key in METRICS_OF[part]:
        module, _, name = key.partition(":")
        metric = getattr(importlib.import_module(f"birthmark.metrics.{module}"), name)
        found += [(metric, "update"), (metric, "compute")]
    return found


@contextmanager
def timed(part: str, spent: dict[str, float]) -> Iterator[None]:
    """Add the seconds in a part's methods to ``spent[part]``."""
    with ExitStack() as patches:
        for owner, name in methods_of(part):
            patches.enter_context(patch.object(owner, name, _timing(getattr(owner, name), part, spent)))
        yield


def _timing(method: Callable[..., object], part: str, spent: dict[str, float]) -> Callable[..., object]:
    @wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    return call


def parts_row(shape: Shape, repeats: int) -> list[str]:
    """Measure how much each part adds to a snapshot, and the whole over the forward pass."""
    forward, snapshot = passes(shape, born(shape.config, 0)).values()
    forward()
    snapshot()
    rows = []
    for _ in range(repeats):
        spent = dict.fromkeys(ELSEWHERE, 0.0)
        plain = seconds(forward, "cpu")
        with ExitStack() as clocks:
            for part in spent:
                clocks.enter_context(timed(part, spent))
            whole = seconds(snapshot, "cpu")
        rows.append([plain, whole / plain, *(whole / (whole - took) for took in spent.values())])
    plain, *ratios = np.array(rows).T
    return [f"{1000 * np.median(plain):.0f}", *(text for ratio in ratios for text in quartiles(ratio))]


def quartiles(values: np.ndarray) -> tuple[str, str]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.3f}", f"{low:.3f}–{high:.3f}"


def time_row(shape: Shape, repeats: int) -> list[str]:
    """Return the medians of one shape, in milliseconds, and ratios."""
    model = born(shape.config, 0)
    functions = [function for times in (1, 2) for function in passes(shape, model, times).values()]
    for function in functions:
        function()
    once, with_snapshot, twice, with_snapshot_twice = np.array(
        [[seconds(function, "cpu") for function in functions] for _ in range(repeats)]
    ).T
    extra, extra_twice = with_snapshot - once, with_snapshot_twice - twice
    per_sequence = 1 + np.median(extra_twice - extra) / np.median(twice - once)
    return [
        *(f"{1000 * np.median(values):.0f}" for values in (once, with_snapshot)),
        *quartiles(with_snapshot / once),
        *quartiles(with_snapshot_twice / twice),
        f"{1000 * np.median(2 * extra - extra_twice):.0f}",
        f"{per_sequence:.2f}",
    ]


def _resident(field: str) -> float:
    """Read VmRSS or VmHWM of this process, in MiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(field)).split()[1]) / 1024


def measure_peak(shape: Shape, kind: str) -> dict[str, float]:
    """Measure the resident size before a pass and its peak during it, in MiB."""
    function = passes(shape, born(shape.config, 0))[kind]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of making the model, is forgotten
    before = _resident("VmRSS")
    function()
    return {"before": before, "peak": _resident("VmHWM")}


def memory_row(name: str) -> list[str]:
    """Return the peaks of one shape in MiB, medians over several processes each; their ratio with the smallest and
    largest; and their height above the model at rest.
    """
    found = []
    for _ in range(5):
        # Freed memory is fragmented differently each time: peaks of one pass differ by some per cent.
        for kind in PASSES:
            command = [sys.executable, __file__, "--peak", name, kind]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(output.splitlines()[-1]))
    peaks, above = (np.array(values).reshape(-1, 2) for values in zip(*map(_peak_and_rise, found), strict=True))
    ratio = peaks[:, 1] / peaks[:, 0]
    return [
        *(f"{value:.0f}" for value in np.median(peaks, axis=0)),
        f"{np.median(ratio):.2f}",
        f"{ratio.min():.2f}–{ratio.max():.2f}",
        *(f"{value:.0f}" for value in np.median(above, axis=0)),
    ]


def _peak_and_rise(found: dict[str, float]) -> tuple[float, float]:
    return found["peak"], found["peak"] - found["before"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="rounds of timings per shape")
    parser.add_argument("--shapes", default="", help="only those whose names contain one of these, comma-separated")
    parser.add_argument("--parts", action="store_true", help="what anatomy and outliers add, in place of the rest")
    parser.add_argument("--peak", nargs=2, metavar=("SHAPE", "PASS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keep_freed_memory()  # as runs and commands do
    if arguments.peak:
        name, kind = arguments.peak
        print(json.dumps(measure_peak(SHAPES[name], kind)))
        return
    wanted = [name for name in SHAPES if any(part in name for part in arguments.shapes.split(","))]
    if arguments.parts:
        parts = Table("shape", "probe", "forward, ms", "of forward", "quartiles")
        for part in ELSEWHERE:
            parts.add_column(f"{part}, over without")
            parts.add_column("quartiles")
        for name in wanted:
            shape = SHAPES[name]
            parts.add_row(name, f"{shape.n_sequences} × {shape.seq_len}", *parts_row(shape, arguments.repeats))
        Console(width=160).print(parts)
        return
    timed = ("forward, ms", "snapshot, ms", "ratio", "quartiles", "of twice", "quartiles", "once, ms", "per sequence")
    held = ("forward, MiB", "snapshot, MiB", "ratio", "range", "forward above rest", "snapshot above rest")
    timing, memory = (Table("shape", "probe", *columns) for columns in (timed, held))
    for name in wanted:
        shape = SHAPES[name]
        head = [name, f"{shape.n_sequences} × {shape.seq_len}"]
        memory.add_row(*head, *memory_row(name))
        timing.add_row(*head, *time_row(shape, arguments.repeats))
    console = Console(width=160)
    console.print(timing, memory)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32")


if __name__ == "__main__":
    main()
