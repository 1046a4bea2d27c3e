"""The usual measurement of a model against one pass of ours: the same model, the same probe, the same numbers.

    python benchmarks/usual_way.py [--lengths 512 1024 2048] [--rounds 5] [--json]

The model is a newborn ``LlamaForCausalLM`` of ``transformers`` (d 768, 12 blocks, 12 heads, f 2048, V 32000: 134M
parameters) in float32, the probe 2 sequences of T random tokens in one batch.

Three ways (``ways.py``): *as published*, what the released scripts do; *at its best*, the same with everything
spared that can be; and *ours*.

Times: each lives in a process of its own, and they take turns round by round; the median of the rounds' ratios counts.
Memory: the peak resident memory of each process (``ru_maxrss``), over what was resident after the model had been loaded
and measured on 16 tokens and free memory had been given back. The whole peaks, with libraries and weights, are printed
beside it. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import resource
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from ways import WAYS, Numbers

#: At T = 2048: times faster, times less memory, largest difference.
LIMITS = {"faster": 3.5, "smaller": 15.0, "difference": 1e-4}
#: Values nearer to each other than this are the same, relative.
ROUNDING = 1e-5
N_SEQUENCES, WARM_UP = 2, 16


# ------------------------------------------------------------------------------------------------------------------
# Processes


def build(attention: str) -> Any:
    """Build the model, in evaluation mode; the same weights in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=4096,
        initializer_range=768**-0.5,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    """Return the present resident memory, after giving free memory back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(way: str, length: int, pipe: Connection) -> None:
    """Serve one side: load the model, then measure on every request and answer with the time it took."""
    import torch

    from birthmark.trainer.devices import keep_freed_memory

    attention, measured = WAYS[way]
    if way == "ours":
        keep_freed_memory()  # as the command does
    model = build(attention)
    tokens = torch.randint(0, 32000, (N_SEQUENCES, length), generator=torch.Generator().manual_seed(1))
    built = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "sum": sum(p.detach().sum(dtype=torch.float64).item() for p in model.parameters()),
        "threads": torch.get_num_threads(),
    }
    pipe.send(built)
    measured(model, tokens[:, :WARM_UP])
    loaded = resident_bytes()
    numbers: Numbers = {}
    while pipe.recv():
        start = time.perf_counter()
        numbers = measured(model, tokens)
        pipe.send(time.perf_counter() - start)
    peak = peak_bytes()
    pipe.send({"numbers": numbers, "peak": peak, "above": peak - loaded})


def differences(usual: Numbers, found: Numbers) -> dict[str, dict[str, float]]:
    """Return the differences of every quantity that both have: the largest one, and the same over the largest value."""
    shared = {}
    for name, theirs in usual.items():
        ours = np.asarray(found[name], dtype=np.float64)
        if name in ("massive_position", "massive_channel"):
            # Positions in a list by size: values that are equal up to rounding may come in either order.
            value_SK = usual["massive_value"]
            apart = np.abs(np.diff(value_SK, axis=-1)) > ROUNDING * value_SK[:, 1:]
            edge = np.ones((len(value_SK), 1), dtype=bool)
            distinct = np.hstack([edge, apart]) & np.hstack([apart, ~edge])
            ours, theirs = np.where(distinct, ours, 0), np.where(distinct, theirs, 0)
        largest = float(np.abs(theirs).max())
        gap = float(np.abs(ours - theirs).max())
        shared[name] = {"absolute": gap, "relative": gap / largest if largest else gap}
    return shared


def compare(length: int, rounds: int) -> dict[str, Any]:
    """Compare the ways at one length."""
    context, pipes, processes, built = get_context("spawn"), {}, [], {}
    for way in WAYS:
        pipes[way], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(way, length, theirs)))
        processes[-1].start()
        built[way] = pipes[way].recv()
    if any(built[way] != built["ours"] for way in WAYS):
        raise SystemExit(f"the processes have different models: {built}")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 1):
        for way, pipe in pipes.items():
            pipe.send(True)
            took = pipe.recv()
            if round_:  # the first round faults its memory in
                seconds[way].append(took)
    results = {}
    for way, pipe in pipes.items():
        pipe.send(False)
        results[way] = pipe.recv()
    for process in processes:
        process.join()
    rivals = {}
    for way in WAYS:
        if way != "ours":
            ratios = [a / b for a, b in zip(seconds[way], seconds["ours"], strict=True)]
            shared = differences(results[way]["numbers"], results["ours"]["numbers"])
            rivals[way] = {
                "faster": statistics.median(ratios),
                "quartiles": [float(q) for q in np.percentile(ratios, [25, 75])],
                "smaller": results[way]["above"] / results["ours"]["above"],
                "difference": max(gap["relative"] for gap in shared.values()),
                "differences": shared,
            }
    return {
        "length": length,
        "seconds": {way: statistics.median(times) for way, times in seconds.items()},
        "above_bytes": {way: results[way]["above"] for way in WAYS},
        "peak_bytes": {way: results[way]["peak"] for way in WAYS},
        "rivals": rivals,
        **{name: built["ours"][name] for name in ("parameters", "threads")},
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("T", "way", "s", "ours is × faster", "quartiles", "MiB", "ours is × smaller")
    for heading in ("whole peak, GiB", "largest difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        for way in WAYS:
            cells = [str(row["length"]), way, f"{row['seconds'][way]:.2f}"]
            above, peak = f"{row['above_bytes'][way] / 2**20:,.0f}", f"{row['peak_bytes'][way] / 2**30:.2f}"
            if way == "ours":
                table.add_row(*cells, "", "", above, "", peak, "", end_section=True)
                continue
            rival = row["rivals"][way]
            worst = max(rival["differences"], key=lambda name: rival["differences"][name]["relative"])
            table.add_row(
                *cells,
                f"{rival['faster']:.2f}",
                "–".join(f"{q:.2f}" for q in rival["quartiles"]),
                above,
                f"{rival['smaller']:.1f}",
                peak,
                f"{rival['difference']:.0e} ({worst})",
            )
    return table


def _verdicts(row: dict[str, Any]) -> list[str]:
    published, every = row["rivals"]["as published"], row["rivals"].values()
    kept = {
        f"≥ {LIMITS['faster']:g} × faster": published["faster"] >= LIMITS["faster"],
        f"≥ {LIMITS['smaller']:g} × less memory": published["smaller"] >= LIMITS["smaller"],
        f"differences ≤ {LIMITS['difference']:g}": all(r["difference"] <= LIMITS["difference"] for r in every),
    }
    return [f"{limit}: {'kept' if good else 'MISSED'}" for limit, good in kept.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of timings per length, after one that is dropped")
    parser.add_argument("--json", action="store_true", help="print it as JSON, with the difference of every quantity")
    args = parser.parse_args()
    rows = [compare(length, args.rounds) for length in args.lengths]
    from importlib.metadata import version

    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "birthmark"))
    if args.json:
        print(json.dumps({"versions": libraries, "rows": rows}, indent=2))
        return
    console = Console(width=150)
    console.print(_table(rows))
    for row in rows:
        if row["length"] == 2048:
            console.print("At T = 2048, against what is published: " + "; ".join(_verdicts(row)), highlight=False)
    n_compared = len(rows[0]["rivals"]["as published"]["differences"])
    console.print(
        f"{rows[0]['parameters']:,} parameters, float32, {N_SEQUENCES} sequences, {n_compared} quantities compared, "
        f"{args.rounds} rounds; {rows[0]['threads']} threads, {platform.machine()}, CPython "
        f"{platform.python_version()}, {libraries}",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
