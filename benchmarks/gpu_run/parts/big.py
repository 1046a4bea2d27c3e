"""Plans against measured peaks, up to 7B with activation checkpointing on one card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from machine import device_name
from record import SKIPPED

from birthmark.plan.cluster import Cluster
from birthmark.plan.planner import Planner
from birthmark.trainer.gpu_specs import GPUS, find_gpu

from ..case import Case, Setting
from ..fit import fit, run_config
from ..models import LLAMA_1B, LLAMA_7B, TINY, Sized
from .train import training

#: Share of the card's memory that a plan may take: the rest is CUDA's own.
USABLE = 0.96
#: Least model FLOPs utilisation of 7B.
MFU = 0.45
GIB = 2**30


def planned_gpu(device: str) -> str:
    """Return the planner's name of the card. Peaks are the same for all cards; an unknown one is planned as an H100."""
    if torch.device(device).type == "cpu":
        return "cpu"
    gpu = find_gpu(device_name(device))
    memory = torch.cuda.get_device_properties(device).total_memory
    named = [name for name, known in GPUS.items() if gpu is not None and known.part == gpu.part]
    return min(named, key=lambda name: abs(GPUS[name].memory - memory), default="h100-80gb")


def _planned(sized: Sized, checkpointing: str, how: str, setting: Setting) -> Iterator[dict[str, Any]]:
    trainer = training(sized.shape, setting, activation_checkpointing=checkpointing, compile=how)
    if not setting.tiny:
        trainer = replace(trainer, max_steps=8)
    config = run_config(sized.config(), trainer)
    plan = Planner(config, Cluster(1, planned_gpu(setting.device))).plan()
    row = {
        "table": "`birthmark plan` beside the measured peak, bf16",
        "activation_checkpointing": checkpointing,
        "compile": how,
        "batch": f"{plan.micro_batch_size} × {sized.shape.seq_len}",
        "planned, GiB": plan.peak / GIB,
    }
    if torch.device(setting.device).type == "cuda":
        memory = torch.cuda.get_device_properties(setting.device).total_memory
        if plan.peak > USABLE * memory:
            note = f"needs {plan.peak / GIB:.1f} GiB, the card has {memory / GIB:.1f}"
            yield row | {"status": SKIPPED, "note": note}
            return
    found = fit(config, setting.device, 3 if not setting.tiny else 2)
    halved = found.micro_batch_size != plan.micro_batch_size
    peak = found.peak_bytes
    yield row | {
        "parameters": found.parameters,
        "peak, GiB": None if peak is None else peak / GIB,
        "planned over peak": None if peak is None or halved or peak <= 0 else plan.peak / peak,
        "tokens/s": found.tokens_per_s,
        "MFU": found.mfu,
        **(setting.limit(found.mfu, MFU, at_most=False) if sized is LLAMA_7B else {}),
        "note": f"did not fit as planned: measured with micro-batches of {found.micro_batch_size}" if halved else "",
    }


def cases(setting: Setting) -> list[Case]:
    """Return the cases, the largest first."""
    if setting.tiny:
        return [Case("tiny", partial(_planned, TINY, "full", "no"))]
    return [
        Case("7B", partial(_planned, LLAMA_7B, "full", "no"), 150),
        Case("1.1B", partial(_planned, LLAMA_1B, "none", "no"), 60),
        Case("1.1B, checkpointed", partial(_planned, LLAMA_1B, "full", "no"), 60),
        Case("7B, compiled", partial(_planned, LLAMA_7B, "full", "blocks"), 180),
    ]
