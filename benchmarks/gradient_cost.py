"""Cost of a backward snapshot against a plain pass forwards and backwards over the same probe.

    python benchmarks/gradient_cost.py [--repeats 15] [--shapes demo,60M]

The peer is what training does with the same batches: the loss, and its gradients by all parameters. Both run in one
process, in turn, A B A B …; the result is the median of the pairwise ratios, because machines are noisy.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from device import seconds
from rich.console import Console
from rich.table import Table

from birthmark.data.probes import random_probe
from birthmark.measure.gradients import measure_gradients
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.trainer.devices import keep_freed_memory

#: Shape, and the probe: (config, sequences, tokens of each, sequences at once).
SHAPES = {
    "demo (d 192, L 4, V 4096)": (ModelConfig(d_model=192, n_layers=4), 64, 64, 32),
    "8M (d 256, L 6, V 4096)": (ModelConfig(n_layers=6), 16, 256, 8),
    "60M (d 512, L 8, V 32000)": (
        ModelConfig(d_model=512, n_layers=8, n_heads=8, vocab_size=32000, max_seq_len=1024, mlp="swiglu"),
        4,
        256,
        4,
    ),
}


def plainly(model: Decoder, probe_NT: np.ndarray, batch_size: int) -> None:
    """Run forwards and backwards, as training does."""
    for tokens_BT in torch.from_numpy(probe_NT).split(batch_size):
        model(tokens_BT[:, :-1], targets_BS=tokens_BT[:, 1:]).objective.backward()
    model.zero_grad(set_to_none=True)


def row(name: str, repeats: int) -> list[str]:
    """Return the medians of one shape in milliseconds, and of the ratio."""
    config, n_sequences, seq_len, batch_size = SHAPES[name]
    model, probe_NT = born(config, 0), random_probe(config.vocab_size, n_sequences, seq_len, 0)
    functions = (
        lambda: plainly(model, probe_NT, batch_size),
        lambda: measure_gradients(model, probe_NT, batch_size=batch_size),
    )
    for function in functions:
        function()
    plain, measured = np.array([[seconds(function, "cpu") for function in functions] for _ in range(repeats)]).T
    low, middle, high = np.percentile(measured / plain, [25, 50, 75])
    times = (f"{1000 * np.median(values):.0f}" for values in (plain, measured))
    return [name, f"{n_sequences} × {seq_len}", *times, f"{middle:.2f}", f"{low:.2f}–{high:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="rounds of timings per shape")
    parser.add_argument("--shapes", default="", help="only those whose names contain one of these, comma-separated")
    arguments = parser.parse_args()
    keep_freed_memory()  # as runs and commands do
    table = Table("shape", "probe", "forward and backward, ms", "backward snapshot, ms", "ratio", "quartiles")
    for name in SHAPES:
        if any(part in name for part in arguments.shapes.split(",")):
            table.add_row(*row(name, arguments.repeats))
    console = Console(width=140)
    console.print(table)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")


if __name__ == "__main__":
    main()
