"""Cost of the output head's loss: peak bytes per logit and time, against the whole logits and torch's own operator.

    python benchmarks/loss_cost.py [--rounds 5] [--date 2026-11-22]

``whole`` is what the trainer did before it had the loss over chunks: all logits, a float32 copy, ``F.cross_entropy``.
``torch`` is ``F.linear_cross_entropy`` (torch ≥ 2.13) with the options that its row names. Peaks are those of torch's
own allocator, as its profiler records them, beyond the table in the precision of the pass and the gradients of both
inputs. Times are processor seconds of one thread; the ways alternate within a round, each is divided by ``whole`` of
its round, and the median of these ratios counts.

The training step is that of a model of 12 blocks: forward, loss, backward, AdamW. Its peak is given whole, and beyond
weights, gradients and the optimizer's state.

Results go to ``benchmarks/results/loss_cost.md`` and ``.json``, or where ``--out`` says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.linear_cross_entropy import linear_cross_entropy
from birthmark.trainer.devices import keep_freed_memory
from birthmark.trainer.module import next_token_loss

HERE = Path(__file__).parent
#: Loss of (hidden states ``[N, D]``, table ``[V, D]``, targets ``[N]``).
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Rows of the head alone: rows, vocabulary, dtype of the pass.
HEADS = [
    (512, 32000, "bf16"),
    (2048, 32000, "bf16"),
    (1024, 50304, "bf16"),
    (512, 32000, "fp32"),
    (2048, 32000, "fp32"),
]
TINY = [(4096, 512, 64, "fp32"), (4096, 4096, 192, "fp32"), (4096, 4096, 192, "bf16")]
"""Rows, vocabulary, width and dtype of the two demos."""


def whole(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, table).float(), targets, reduction="none").mean()


def ours(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, table, targets).objective


def of_torch(**options: Any) -> Way:
    def way(x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):  # which does not reach it
            x, table = x.bfloat16(), table.bfloat16()
        chosen = torch.nn.LinearCrossEntropyOptions(**options)
        return F.linear_cross_entropy(x, table, targets, options=chosen)

    return way


def ways() -> dict[str, Way]:
    found: dict[str, Way] = {"whole": whole, "birthmark": ours}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["torch, its defaults"] = of_torch()
        found["torch, chunks of 256"] = of_torch(batch_chunk_size=256)
    return found


def step(way: Way, x: Tensor, table: Tensor, targets: Tensor, bf16: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        loss = way(x, table, targets)
    loss.backward()
    x.grad = table.grad = None


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes allocated at once while ``function`` runs, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        function()
    now = most = 0
    for event in traced.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def head_rows(n: int, vocab_size: int, width: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator).requires_grad_()
    table = (torch.randn(vocab_size, width, generator=generator) * width**-0.5).requires_grad_()
    targets, bf16 = torch.randint(vocab_size, (n,), generator=generator), dtype == "bf16"
    seconds: dict[str, list[float]] = {name: [] for name in ways()}
    for turn in range(rounds + 1):
        for name, way in ways().items():
            start = time.thread_time()
            step(way, x, table, targets, bf16)
            if turn:
                seconds[name].append(time.thread_time() - start)
    given = 4 * width * (n + vocab_size) + (2 * width * vocab_size if bf16 else 0)
    found = []
    for name, way in ways().items():
        ratios = [own / base for own, base in zip(seconds[name], seconds["whole"], strict=True)]
        peak = peak_bytes(lambda way=way: step(way, x, table, targets, bf16)) - given  # type: ignore[misc]
        found.append(
            {
                "rows": n,
                "vocab_size": vocab_size,
                "width": width,
                "dtype": dtype,
                "way": name,
                "bytes_per_logit": peak / (n * vocab_size),
                "ms": 1000 * statistics.median(seconds[name]),
                "over_whole": statistics.median(ratios),
                "ratios": sorted(ratios),
            }
        )
    return found


def whole_of_model(model: Decoder, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none").mean()


def ours_of_model(model: Decoder, batch: Tensor) -> Tensor:
    return next_token_loss(model, batch).objective


def training_step() -> list[dict[str, Any]]:
    config = ModelConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=32000, max_seq_len=2048)
    model = born(config, 0).train()
    batch = torch.randint(32000, (1, 2049), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def one(loss_of: Callable[[Decoder, Tensor], Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one(ours_of_model)  # makes the optimizer's state
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    found = []
    for name, loss_of in (("whole", whole_of_model), ("birthmark", ours_of_model)):
        peak = peak_bytes(lambda loss_of=loss_of: one(loss_of))  # type: ignore[misc]
        # Weights and two moments were there; gradients come with the step.
        found.append({"way": name, "peak": peak + 3 * weights, "beyond_states": peak - weights})
    return found


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]


def report(found: dict[str, Any], args: argparse.Namespace) -> str:
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    lines = [
        f"# loss_cost.py, {args.date}",
        "",
        f"One thread of {os.cpu_count()} cores of {processor}, torch {torch.__version__}, {args.rounds} rounds."
        + (f" {args.note}" if args.note else ""),
        "",
        "## The head alone, forward and backward",
    ]
    table = [
        [
            row["dtype"],
            f"{row['rows']} × {row['vocab_size']}",
            str(row["width"]),
            row["way"],
            f"{row['bytes_per_logit']:.2f}",
            f"{row['ms']:.0f}",
            f"{row['over_whole']:.2f}",
        ]
        for row in found["heads"]
    ]
    lines += markdown(["pass", "rows × V", "D", "way", "peak, bytes per logit", "ms", "time over whole"], table)
    if "step" in found:
        lines += ["", "## A training step: 12 blocks, D 768, V 32000, T 2048, micro-batch 1, bf16 autocast, AdamW"]
        base = found["step"][0]
        table = [
            [
                row["way"],
                f"{row['peak'] / 2**20:.0f}",
                f"{row['peak'] / base['peak']:.2f}",
                f"{row['beyond_states'] / 2**20:.0f}",
                f"{row['beyond_states'] / base['beyond_states']:.2f}",
            ]
            for row in found["step"]
        ]
        lines += markdown(["way", "peak, MiB", "over whole", "beyond weights and states, MiB", "over whole"], table)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=["heads", "step"], default=["heads", "step"])
    parser.add_argument("--note", default="", help="a sentence about the machine for the report")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--out", type=Path, default=HERE / "results" / "loss_cost", help="without a suffix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    found: dict[str, Any] = {"date": args.date, "torch": torch.__version__, "heads": []}
    if "heads" in args.parts:
        for n, vocab_size, width, dtype in [*TINY, *((n, v, 768, dtype) for n, v, dtype in HEADS)]:
            found["heads"] += head_rows(n, vocab_size, width, dtype, args.rounds)
            print(*found["heads"][-len(ways()) :], sep="\n", flush=True)
    if "step" in args.parts:
        found["step"] = training_step()
    text = report(found, args)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(text)
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
