"""What a model is made of, without allocating it: parameters by part, FLOPs, memory, kernel."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from ..models.attention.kernel_choice import kernel_sentence
from ..models.config import ModelConfig
from ..models.parameter_shapes import n_idle, parameter_shapes
from ..trainer.throughput import flops_per_token

#: Bytes per parameter of a training run in float32 or bf16-mixed: weights, gradients and two AdamW moments in float32.
BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}


def _part(name: str) -> str:
    """The part of the model that a parameter belongs to, block numbers left out."""
    return ".".join(word for word in name.split(".")[:-1] if not word.isdigit())


def describe(config: ModelConfig) -> dict[str, Any]:
    """Everything that ``birthmark describe`` prints, as JSON-able values; nothing is allocated.

    Returns:
        ``n_params``; ``n_active``, those that a token passes; ``parameters`` by part; ``flops_per_token`` of training
        at ``max_seq_len``; ``memory`` in bytes, by part, for one device without sharding; ``kv_cache`` in bytes per
        token in bf16; ``kernel``.
    """
    parts: Counter[str] = Counter()
    for name, shape in parameter_shapes(config):
        parts[_part(name)] += math.prod(shape)
    n_params = sum(parts.values())
    return {
        "n_params": n_params,
        "n_active": n_params - n_idle(config),
        "parameters": dict(parts),
        "flops_per_token": flops_per_token(config, n_params, config.max_seq_len),
        "memory": {part: size * n_params for part, size in BYTES.items()},
        "kv_cache": 2 * config.n_layers * sum(n_heads * width for n_heads, width in config.cached),
        "kernel": kernel_sentence(config),
    }


def print_description(description: dict[str, Any], console: Console) -> None:
    """Print what :func:`describe` gives as a table."""
    table = Table("part", "parameters", "share", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part, count in description["parameters"].items():
        table.add_row(part, f"{count:,}", f"{100 * count / description['n_params']:.1f} %")
    table.add_row("[bold]all", f"[bold]{description['n_params']:,}", "")
    console.print(table)
    if description["n_active"] != description["n_params"]:
        console.print(f"parameters per token      {description['n_active']:,}", highlight=False)
    memory = ", ".join(f"{part} {size / 2**30:.2f} GiB" for part, size in description["memory"].items())
    console.print(f"training FLOPs per token  {description['flops_per_token']:.4g}", highlight=False)
    console.print(f"training memory           {memory}, and activations", highlight=False, soft_wrap=True)
    console.print(f"KV cache                  {description['kv_cache']:,} bytes per token in bf16", highlight=False)
    console.print(f"attention kernel          {description['kernel']}", highlight=False, soft_wrap=True)
