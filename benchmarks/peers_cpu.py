"""Training steps per second on the CPU: ours over those of transformers, litgpt and nanoGPT, in one run.

    python -m pip install --no-deps --target benchmarks/.peers litgpt==0.5.13 nano-gpt==0.1.0 tiktoken==0.14.0
    python benchmarks/peers_cpu.py [--models llama-134m gpt2-124m] [--modes eager compiled] [--rounds 7]

A step is forward, loss, backward and dropping the gradients, for 134M parameters (LLaMA-like, V 32000) and for GPT-2's
124M, which nanoGPT has; two sequences of 512 tokens, or one of 2,048 (134M) or 1,024 (GPT-2's own length), bf16
autocast where the CPU has instructions for it and float32 where it has not. Every library lives in a process of its own
with the same allocator setting, and takes its turn in every round: the median of the rounds' ratios counts. Ours should
be at least 1.15 × the best of the others. The matrix products of a step alone take their turn too: they say what is
left to gain.

Each model and mode is a part of ``benchmarks/results/peers_cpu.md`` and ``.json``, which another run of it replaces. On
two quiet cores the default, eager and compiled, takes under 8 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import torch
from breakdown import products_of_step
from device import seconds
from libraries import LIBRARIES, Shape
from peers import Worker
from record import NOT_INSTALLED, SKIPPED, Record, limit

HERE = Path(__file__).parent
#: Wanted tokens per second of ours over those of the best other library.
FASTER = 1.15
#: Row of the work that no library can save.
PRODUCTS = "matrix products alone"
MODELS = {
    "llama-134m": Shape(d_ff=2048, vocab_size=32000, seq_len=512, micro_batch=2, tie_embeddings=False),
    "llama-134m-t2048": Shape(d_ff=2048, vocab_size=32000, seq_len=2048, tie_embeddings=False),
    "gpt2-124m": Shape(vocab_size=50304, seq_len=512, micro_batch=2, gpt2=True),
    "gpt2-124m-t1024": Shape(vocab_size=50304, gpt2=True),
}
#: For a rehearsal.
TINY = {"d_model": 64, "n_layers": 1, "n_heads": 2, "d_ff": 256, "vocab_size": 256, "seq_len": 32}


def compare(record: Record, part: str, shape: Shape, args: argparse.Namespace, bf16: bool, compiled: bool) -> None:
    """Compare the libraries on one model in one mode: a row for each library, ours first, with our speed over its."""
    workers: dict[str, Worker] = {}
    try:
        for name in args.libraries:
            workers[name] = Worker(
                sys.executable,
                name,
                shape,
                bf16=bf16,
                compiled=compiled,
                threads=args.threads,
                packages=None if name in ("birthmark", "transformers") else args.peers,
            )
        able = {name: worker for name, worker in workers.items() if "cannot" not in worker.built}
        counts = {name: worker.built["parameters"] for name, worker in able.items()}
        if len(set(counts.values())) != 1:
            raise SystemExit(f"the libraries built different models: {counts} parameters")
        times: dict[str, list[float]] = {name: [] for name in [*able, PRODUCTS]}
        products = products_of_step(shape, torch.bfloat16 if bf16 else torch.float32)
        for round_ in range(args.rounds + 1):
            for name, worker in able.items():
                took = worker.step()
                if round_:  # the first one warms up
                    times[name].append(took)
            took = seconds(products, "cpu")
            if round_:
                times[PRODUCTS].append(took)
    finally:
        for worker in workers.values():
            worker.close()
    of_all = {
        name: [theirs / ours for theirs, ours in zip(found, times["birthmark"], strict=True)]
        for name, found in times.items()
    }
    ratios = {name: of_all[name] for name in able if name != "birthmark"}
    for name, worker in workers.items():
        row: dict[str, Any] = {"case": name}
        if name not in able:
            status = SKIPPED if worker.built["installed"] else NOT_INSTALLED
            record.add(part, row | {"status": status, "note": worker.built["cannot"]})
            continue
        took = statistics.median(times[name])
        row |= {"version": worker.built["version"], "loss": worker.built["loss"], "parameters": counts[name]}
        row |= {"tokens/s": shape.micro_batch * shape.seq_len / took, "ms": 1000 * took}
        if name in ratios:
            low, middle, high = statistics.quantiles(ratios[name], n=4)
            row |= {"ours over it": middle, "quartiles": f"{low:.3f}–{high:.3f}"}
        record.add(part, row)
    low, middle, high = statistics.quantiles(of_all[PRODUCTS], n=4)
    about = {"ours over it": middle, "quartiles": f"{low:.3f}–{high:.3f}", "note": "no step is faster"}
    record.add(part, {"case": PRODUCTS, "ms": 1000 * statistics.median(times[PRODUCTS]), **about})
    best = min((statistics.median(found) for found in ratios.values()), default=None)
    row = {"case": "ours over the best of the others", "ours over it": best}
    record.add(part, row | limit(best, FASTER, at_most=False))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-134m"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=7, help="rounds of one step each, after one that warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peers", type=Path, default=HERE / ".peers", help="folder that has litgpt and nano-gpt")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with a tiny model")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "peers_cpu", help="without a suffix")
    args = parser.parse_args(arguments)
    if args.tiny and args.out == parser.get_default("out"):
        parser.error("--tiny is a rehearsal: give --out, so that it does not overwrite a measurement")
    record = Record(args.out, "Training steps on a CPU: ours over other libraries")
    bf16 = machine.cpu_has_bf16()
    for model in args.models:
        for mode in args.modes:
            part = f"{model}, {mode}, {'bf16' if bf16 else 'fp32'}"
            shape = replace(MODELS[model], **TINY) if args.tiny else MODELS[model]
            start = time.perf_counter()
            command = f"python benchmarks/peers_cpu.py --models {model} --modes {mode} --rounds {args.rounds}"
            about = machine.describe("cpu") | {"threads": str(args.threads)}
            record.begin(part, command, about, [mode])
            compare(record, part, shape, args, bf16, mode == "compiled")
            record.done(part, mode)
            print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(record.markdown())


if __name__ == "__main__":
    main()
