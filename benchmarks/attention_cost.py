"""Cost of the attention arms in training, against plain softmax; for other libraries see ``peers_cpu.py``.

    python benchmarks/attention_cost.py [--rounds 11] [--date 2026-11-20]

A step is forward, loss, backward and dropping the gradients; no optimizer. Steps of all arms follow one
another, A B C … A B C …, each is divided by the first one's of its round, and the median of these ratios counts, with
its quartiles. The limits are for the whole model; one attention alone shows what the rest of the model hides.

One attention on a GPU, forward and backward, over lengths (all with as many tokens as the longest); on CPU a rehearsal:

    python benchmarks/attention_cost.py --device cuda --parts lengths --lengths 1024 2048 4096 8192 --out FILE
    python benchmarks/attention_cost.py --parts lengths --lengths 64 128 --d-model 64 --n-heads 4 --rounds 1 --out FILE

Results go to ``benchmarks/results/attention_cost.md`` and ``.json``, or where ``--out`` says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from breakdown import breakdown, product_ceiling
from peers import KEEP_MEMORY, Loss, Shape, llama, timed_step

from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.trainer.module import next_token_loss

HERE = Path(__file__).parent
ANALYTIC = CalibrationConfig(n_eff="analytic")
ESTIMATED = CalibrationConfig(n_eff="exact", correlation="estimated")

#: Arms: changes to the plain config, and how many times plain softmax a training step may cost (None: no limit).
ARMS: dict[str, tuple[dict[str, Any], float | None]] = {
    "plain": ({}, None),
    "headnorm": ({"attention": AttentionConfig(aggregation="headnorm")}, 1.03),
    "calibrated-analytic": ({"attention": AttentionConfig(aggregation="calibrated", calibration=ANALYTIC)}, 1.03),
    "calibrated-exact": ({"attention": AttentionConfig(aggregation="calibrated")}, 1.35),
    "gate-head": ({"attention": AttentionConfig(gate="head")}, 1.05),
    "gate-channel": ({"attention": AttentionConfig(gate="channel")}, 1.05),
    "calibrated-estimated": ({"attention": AttentionConfig(aggregation="calibrated", calibration=ESTIMATED)}, None),
    "differential": ({"attention": AttentionConfig("differential_norm", normaliser="differential")}, 1.1),
    "gate-value": ({"attention": AttentionConfig(gate="channel", gate_at="value")}, 1.1),
    "value-state-gate": (
        {"attention": AttentionConfig(gate="head", gate_at="value", gate_input="value")},
        1.1,
    ),
    "value-norm": ({"attention": AttentionConfig(v_norm="head")}, 1.1),
    "learned-keys-4": ({"attention": AttentionConfig(kv_bias="key_value", kv_bias_tokens=4)}, 1.1),
    "off-by-one": ({"attention": AttentionConfig(normaliser="softmax_off_by_one")}, None),
    "learned-sink": ({"attention": AttentionConfig(normaliser="softmax_sink")}, None),
    "key-value-bias": ({"attention": AttentionConfig(kv_bias="key_value")}, None),
    "window-256": ({"attention": AttentionConfig(window=256)}, None),
    "prefix-64": ({"attention": AttentionConfig(prefix=64)}, None),
    "alibi": ({"positions": "alibi"}, None),
    "sigmoid": ({"attention": AttentionConfig(normaliser="sigmoid", sigmoid_bias="log_length")}, None),
    "t5": ({"positions": "t5"}, None),
}


class Row(NamedTuple):
    """Times of one arm: seconds, and ratios to the first row's within each round."""

    name: str
    seconds: float
    low: float
    ratio: float
    high: float


def interleaved(steps: dict[str, Callable[[], float]], rounds: int, warmup: int, inverse: bool = False) -> list[Row]:
    """Time steps in turn. ``inverse`` turns ratios of times into ratios of speeds."""
    for _ in range(warmup):
        for step in steps.values():
            step()
    times = np.array([[step() for step in steps.values()] for _ in range(rounds)])
    ratios = times[:, :1] / times if inverse else times / times[:, :1]
    low, middle, high = np.percentile(ratios, [25, 50, 75], axis=0)
    columns = (np.median(times, axis=0), low, middle, high)
    return [Row(name, *map(float, values)) for name, *values in zip(steps, *columns, strict=True)]


# ------------------------------------------------------------------------------------------------------------------
# Arms


def build_arms(shape: Shape, names: list[str]) -> dict[str, Decoder]:
    """Build decoders of the arms, which share the storage of their common parameters."""
    models: dict[str, Decoder] = {}
    for name in names:
        model = Decoder(ModelConfig(**{**llama(shape), **ARMS[name][0]}))
        if not models:
            model = born(model.config, 0)
        else:
            model.load_state_dict(next(iter(models.values())).state_dict(), strict=False, assign=True)
        models[name] = model.train().requires_grad_()
    return models


def trainer_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model, batch).objective


def layer_pass(
    model: Decoder, shape: Shape, bf16: bool, compiled: bool, device: str = "cpu", backward: bool = True
) -> Callable[[], None]:
    """Return a function that runs one attention forward, and backward if asked for: projections and everything between
    them. It waits for nothing.
    """
    x = torch.randn(shape.micro_batch, shape.seq_len, shape.d_model, device=device, requires_grad=True)
    upstream = torch.randn(x.shape, device=device)

    def attend(model: Decoder, x: torch.Tensor) -> torch.Tensor:
        return model.blocks[0].attn(x, model.positions.place(shape.seq_len, x.device))

    function = torch.compile(attend) if compiled else attend

    def run() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            out = function(model, x)
        if backward:
            out.backward(upstream.to(out.dtype))
            model.zero_grad(set_to_none=True)
            x.grad = None

    return run


def layer_step(model: Decoder, shape: Shape, bf16: bool, compiled: bool, *more: Any) -> Callable[[], float]:
    """Return :func:`layer_pass` as a step that returns its seconds."""
    run, device = layer_pass(model, shape, bf16, compiled, *more), more[0] if more else "cpu"

    def step() -> float:
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        return time.perf_counter() - start

    return step


def finish(device: str) -> None:
    """Wait for the device, which runs asynchronously."""
    if device == "cuda":
        torch.cuda.synchronize()


def run_lengths(shape: Shape, names: list[str], args: argparse.Namespace) -> dict[str, dict[str, list[Row]]]:
    """Time one attention of each arm over plain's, by length: forward alone and with its backward pass, in
    eager mode.
    """
    found = {}
    for length in args.lengths:
        sequences = max(args.lengths) // length * shape.micro_batch
        here = replace(shape, n_layers=1, vocab_size=256, seq_len=length, micro_batch=sequences)
        models = {name: model.to(args.device) for name, model in build_arms(here, names).items()}
        found[str(length)] = {
            what: interleaved(
                {
                    name: layer_step(model, here, args.dtype == "bf16", False, args.device, what != "forward")
                    for name, model in models.items()
                },
                4 * args.rounds,
                2 * args.warmup,
            )
            for what in ("forward", "forward and backward")
        }
    return found


def run_arms(models: dict[str, Decoder], shape: Shape, args: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Time the whole model, and one attention, of each arm."""
    bf16, batch = args.dtype == "bf16", shape.batch()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 4 * len(ARMS)  # one function, one graph per arm
    loss: Loss = torch.compile(trainer_loss) if compiled else trainer_loss
    found = {}
    if "arms" in args.parts:
        steps = {name: lambda model=model: timed_step(model, loss, batch, bf16) for name, model in models.items()}
        found["arms"] = interleaved(steps, args.rounds, args.warmup)
    if "layer" in args.parts:
        layers = {name: layer_step(model, shape, bf16, compiled) for name, model in models.items()}
        found["layer"] = interleaved(layers, 4 * args.rounds, 2 * args.warmup)
    return found


# ------------------------------------------------------------------------------------------------------------------
# Report


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def arm_lines(rows: list[Row], whole: bool) -> list[str]:
    table = []
    for row in rows:
        limit = ARMS[row.name][1] if whole else None
        verdict = "" if limit is None else f"≤ {limit}: {'kept' if row.ratio <= limit else 'MISSED'}"
        cells = [row.name, f"{1000 * row.seconds:.1f}", f"{row.ratio:.3f}", f"{row.low:.3f}–{row.high:.3f}"]
        table.append([*cells, verdict] if whole else cells)
    return markdown(["arm", "ms", f"× {rows[0].name}", "quartiles", *(["limit"] if whole else [])], table)


def breakdown_lines(found: dict[str, Any]) -> list[str]:
    ceiling = max(found["ceiling"].values())
    table = [
        [
            part.name,
            f"{1000 * part.seconds:.0f}",
            f"{part.share:.1%}",
            f"{part.flops / part.seconds / 1e9:.0f}" if part.flops else "",
            f"{1000 * part.flops / ceiling:.0f}" if part.flops else "",
        ]
        for part in found["breakdown"]
    ]
    total, flops = sum(p.seconds for p in found["breakdown"]), sum(p.flops for p in found["breakdown"])
    at_ceiling = f"{1000 * flops / ceiling:.0f}"
    table.append(["all", f"{1000 * total:.0f}", "", f"{flops / total / 1e9:.0f}", at_ceiling])
    lines = markdown(["part of a plain step", "ms", "share", "GFLOP/s", "ms at the ceiling"], table)
    reached = [[size, f"{flops / 1e9:.0f}"] for size, flops in found["ceiling"].items()]
    return [
        *lines,
        "",
        f"Ceiling: {ceiling / 1e9:.0f} GFLOP/s, the best of:",
        *markdown(["product", "GFLOP/s"], reached),
    ]


def report(found: dict[str, Any], shape: Shape, args: argparse.Namespace) -> str:
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(shape).items())
    lines = [
        f"# attention_cost.py, {args.date}",
        "",
        f"    python benchmarks/attention_cost.py {shlex.join(sys.argv[1:])}".rstrip(),
        "",
        f"{os.cpu_count()} cores of {processor}, {memory:.0f} GiB, {platform.system()}, CPython "
        f"{platform.python_version()}, torch {torch.__version__}, {args.threads} threads.",
        f"{found['parameters']:,} parameters: {sizes}. {args.dtype}, {args.rounds} rounds after {args.warmup}.",
    ]
    if args.device == "cuda":
        lines.append(f"On one {torch.cuda.get_device_name()}.")
    if args.keep_memory:
        lines.append("The allocator keeps its memory (--keep-memory), in all processes.")
    for mode in found["modes"]:
        for part, rows in found[mode].items():
            if part == "arms":
                lines += ["", f"## Arms, whole model, {mode}", *arm_lines(rows, True)]
            elif part == "layer":
                lines += ["", f"## Arms, one attention, {mode}", *arm_lines(rows, False)]
    for length, parts in found.get("lengths", {}).items():
        for what, rows in parts.items():
            lines += ["", f"## Arms, one attention, T {length}, {what}, {args.device}", *arm_lines(rows, False)]
    if "breakdown" in found:
        lines += ["", "## Where a plain step goes, eager", *breakdown_lines(found)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Shape):
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field.type == "bool" else {"type": int}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **kind)
    parser.add_argument(
        "--rounds", type=int, default=11, help="rounds of one step each; four times as many of one layer"
    )
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="plain is always among them")
    parts = ["arms", "layer", "breakdown"]
    parser.add_argument("--parts", nargs="+", choices=[*parts, "lengths"], default=parts)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: for --parts lengths alone")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192], help="of --parts lengths")
    parser.add_argument("--compile", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="bf16: autocast over float32 weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keep-memory", action="store_true", help="let the allocator keep freed memory, everywhere")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--out", type=Path, default=HERE / "results" / "attention_cost", help="without a suffix")
    args = parser.parse_args()
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    if args.device == "cuda" and args.parts != ["lengths"]:
        parser.error("--device cuda: times one attention over lengths alone; add --parts lengths")
    if args.keep_memory and any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY}
        )  # read at a process's start
    torch.set_num_threads(args.threads)

    names = [name for name in ARMS if name == "plain" or name in args.arms]
    alone = args.parts == ["lengths"]
    models: dict[str, Any] = build_arms(replace(shape, n_layers=1, vocab_size=256) if alone else shape, names)
    modes = {"no": ["eager"], "yes": ["compiled"], "both": ["eager", "compiled"]}[args.compile]
    if alone:
        modes = []
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in models["plain"].parameters()), "modes": modes}
    if "breakdown" in args.parts:
        bf16 = args.dtype == "bf16"
        found["ceiling"] = product_ceiling(shape, torch.bfloat16 if bf16 else torch.float32, args.rounds)
        found["breakdown"] = breakdown(models["plain"], trainer_loss, shape.batch(), shape, bf16, 3)
    if "lengths" in args.parts:
        found["lengths"] = run_lengths(shape, names, args)
    for mode in modes:
        found[mode] = run_arms(models, shape, args, mode == "compiled")

    text = report(found, shape, args)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(text)
    stored = {"date": args.date, "command": sys.argv[1:], "shape": asdict(shape), "torch": torch.__version__, **found}
    args.out.with_suffix(".json").write_text(json.dumps(_plain(stored), indent=1, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    """Turn named tuples into dictionaries, recursively."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
