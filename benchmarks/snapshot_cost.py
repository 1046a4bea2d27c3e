"""What a bias snapshot costs, against the plain forward pass over the same probe in the same process.

    python benchmarks/snapshot_cost.py [--repeats 15]

The peer is the cheapest forward pass that reaches the same logits: fused attention, last position only, no gradients.
Both are timed in turn, A B A B …, and the median of the pairwise ratios is what counts: machines are noisy.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from birthmark.callbacks.measure import birth_reference, measure, undisturbed
from birthmark.data.probes import random_probe
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

SHAPES = {
    "demo (d 192, L 4, V 4096)": (ModelConfig(d_model=192, n_layers=4), 256, 64, 64),
    "facts (d 128, L 4, V 1024)": (ModelConfig(d_model=128, vocab_size=1024), 256, 32, 64),
    "8M, T 256 (d 256, L 6, V 4096)": (ModelConfig(n_layers=6), 64, 256, 32),
    "LLaMA-like 134M, T 256 (d 768, L 12, V 32000)": (
        ModelConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=32000, max_seq_len=512, mlp="swiglu"),
        8,
        256,
        4,
    ),
}


def seconds(function: object) -> float:
    start = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of timings per shape")
    repeats = parser.parse_args().repeats
    table = Table("shape", "probe", "forward, ms", "snapshot, ms", "ratio: median", "quartiles")
    for name, (config, n, length, batch_size) in SHAPES.items():
        model, probe = born(config, 0), random_probe(config.vocab_size, n, length, 0)
        birth = birth_reference(model, probe, batch_size)
        batches = torch.from_numpy(probe).split(batch_size)

        def forward(model: torch.nn.Module = model, batches: tuple[torch.Tensor, ...] = batches) -> None:
            with undisturbed(model):
                for tokens in batches:
                    model(tokens, last_only=True)

        def snapshot(model=model, probe=probe, birth=birth, batch_size=batch_size) -> None:  # type: ignore[no-untyped-def]
            measure(model, probe, birth, [birth, birth], batch_size=batch_size)

        forward(), snapshot()
        pairs = [(seconds(forward), seconds(snapshot)) for _ in range(repeats)]
        ratios = [b / a for a, b in pairs]
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        a, b = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        table.add_row(name, f"{n} × {length}", f"{a:.0f}", f"{b:.0f}", f"{middle:.2f}", f"{low:.2f}–{high:.2f}")
    console = Console(width=130)
    console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32")


if __name__ == "__main__":
    main()
