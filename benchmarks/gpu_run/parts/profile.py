"""Profile of the time: for each pass the share in which the device is busy, and its kernels by kind.

Read it before optimising: a device that waits needs other remedies than one that computes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from device import seconds
from libraries import drawn
from snapshot_cost import Shape as Probe
from snapshot_cost import passes
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from birthmark.measure.passes import sequences_of_pass
from birthmark.models.config import ModelConfig
from birthmark.trainer.config import OptimConfig
from birthmark.trainer.module import next_token_loss
from birthmark.trainer.optimizers.parameter_groups import parameter_groups

from ..case import Case, Setting
from ..models import LLAMA_1B, LLAMA_134M, TINY, Sized

#: Kinds of work by a part of the kernel's name; the first match counts.
KINDS = {
    "products": r"gemm|gemv|cutlass(?!.*fmha)|nvjet|xmma|cublas|splitK",
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"multi_tensor|adam|foreach",
    "eigenvalues": r"sy(?:ev|tr|mv|r2)|stedc|laed|ormtr|larf|larft|dlasr|batch_sym|cusolver",
    "copies": r"^Mem(?:cpy|set)|copy|CatArray",
    "reductions": r"reduce|softmax|norm|Reduce|sort|topk|TopK|cumsum|scan",
    "elementwise": r"elementwise|vectorized|triton_|fill|index|gather|scatter|where|unrolled",
}
#: Kernels that a table names, by their time.
_NAMED = 12


def kind_of(kernel: str) -> str:
    """Name the kind of work of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def _busy(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, -1.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def profiled(name: str, step: Callable[[], object], setting: Setting, tokens: int) -> Iterator[dict[str, Any]]:
    """Profile one call of ``step``, after two warm-up calls; its time is that of calls without the profiler."""
    on_gpu = torch.device(setting.device).type == "cuda"
    for _ in range(2):
        step()
    wall = min(seconds(step, setting.device) for _ in range(2 if setting.tiny else 5))
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        seconds(step, setting.device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in found.events() if event.device_type == wanted]
    busy = _busy([(event.time_range.start, event.time_range.end) for event in events]) / 1e6
    times: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for event in events:
        length = event.time_range.elapsed_us() / 1e3
        times[event.name] += length
        kinds[kind_of(event.name)] += length
    counts = Counter(event.name for event in events)
    yield {
        "table": "Where the time goes",
        "tokens": tokens,
        "ms": 1000 * wall,
        "device busy, ms": 1000 * busy,
        "busy share": busy / wall,
        "kernels": len(events),
        **{f"{kind}, ms": kinds.get(kind, 0.0) for kind in (*KINDS, "other")},
    }
    for kernel, length in times.most_common(_NAMED):
        row = {"table": f"Longest kernels: {name}", "kernel": kernel[:110], "kind": kind_of(kernel)}
        yield row | {"calls": counts[kernel], "ms": length}


def training_step(sized: Sized, how: str, setting: Setting) -> tuple[Callable[[], None], int]:
    """Make a training step of one micro-batch in bf16, with its clip and optimizer; return it with the number of its
    tokens.
    """
    model, device = drawn(sized.config(), setting.device), torch.device(setting.device)
    config = OptimConfig().optimizer
    optimizer = config.build(parameter_groups(model, config), 1e-4)
    if how == "blocks":
        for block in model.blocks:
            block.compile()
    batch = sized.shape.batch(device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = next_token_loss(model, batch).objective
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, batch[:, 1:].numel()


def _training(sized: Sized, how: str, setting: Setting) -> Iterator[dict[str, Any]]:
    step, n_tokens = training_step(sized, how, setting)
    yield from profiled(f"training {sized.name}, compile {how}", step, setting, n_tokens)


def _snapshot(config: ModelConfig, n: int, seq_len: int, setting: Setting) -> Iterator[dict[str, Any]]:
    batch = sequences_of_pass(None, seq_len, config.ff, on_gpu=torch.device(setting.device).type == "cuda")
    both = passes(Probe(config, n, seq_len, min(batch, n)), drawn(config, setting.device))
    for name, step in both.items():
        for row in profiled(name, step, setting, n * seq_len):
            yield row | ({"pass": name} if row["table"] == "Where the time goes" else {})


def cases(setting: Setting) -> list[Case]:
    """Return the cases, snapshots first: with the benchmark's probe and the default one; then training."""
    if setting.tiny:
        return [
            Case("snapshot of tiny", partial(_snapshot, TINY.config(16), 4, 16)),
            Case("training tiny", partial(_training, TINY, "no")),
        ]
    return [
        Case("snapshot of 134M, T 1024", partial(_snapshot, LLAMA_134M.config(1024), 64, 1024), 30),
        Case("snapshot of 134M, default probe", partial(_snapshot, LLAMA_134M.config(1024), 256, 64), 15),
        Case("training 134M, compile no", partial(_training, LLAMA_134M, "no"), 15),
        Case("training 134M, compile blocks", partial(_training, LLAMA_134M, "blocks"), 40),
        Case("training 1.1B, compile blocks", partial(_training, LLAMA_1B, "blocks"), 60),
    ]
