"""Description of a model without allocating it: parameters by part, FLOPs, memory, kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from ..models.attention.kernel_choice import kernel_sentence
from ..models.config import ModelConfig
from ..models.exchange.gguf_header import kinds_in_words
from ..models.parameter_shapes import n_idle, parameter_shapes
from ..report.table import Cell, Column, Table
from ..report.terminal import say
from ..trainer.throughput import flops_per_token

#: Bytes per parameter of a training run in float32 or bf16-mixed: weights, gradients and two AdamW moments in float32.
BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}


def _part(name: str) -> str:
    """Return the part of the model that a parameter belongs to, without block numbers."""
    return ".".join(word for word in name.split(".")[:-1] if not word.isdigit())


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return everything that ``birthmark describe`` prints, as JSON-able values; nothing is allocated.

    Returns:
        ``n_params``; ``n_active``, those that a token passes; ``parameters`` by part; ``flops_per_token`` of training
        at ``max_seq_len``; ``memory`` in bytes, by part, for one device without sharding; ``kv_cache`` in bytes per
        token in bf16; ``kernel``.
    """
    found = describe_shapes(parameter_shapes(config))
    return found | {
        "n_active": found["n_params"] - n_idle(config),
        "flops_per_token": flops_per_token(config, found["n_params"], config.max_seq_len),
        "kv_cache": 2 * config.n_layers * sum(n_heads * width for n_heads, width in config.cached),
        "kernel": kernel_sentence(config),
    }


def describe_shapes(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Describe the facts that follow from the parameters alone.

    Args:
        shapes: name and shape of each parameter.

    Returns:
        ``n_params``, ``parameters`` by part and ``memory``, as :func:`describe`.
    """
    parts: Counter[str] = Counter()
    for name, shape in shapes:
        parts[_part(name)] += math.prod(shape)
    n_params = sum(parts.values())
    return {
        "n_params": n_params,
        "parameters": dict(parts),
        "memory": {part: size * n_params for part, size in BYTES.items()},
    }


def print_description(description: dict[str, Any], console: Console) -> None:
    """Print the description from :func:`describe` as a table."""
    n_params = description["n_params"]
    columns = [Column("part", "name"), Column("parameters", format=",d"), Column("share", format="percent")]
    rows: list[list[object]] = [[part, count, count / n_params] for part, count in description["parameters"].items()]
    rows.append([Cell("all", look="bold"), Cell(n_params, look="bold"), ""])
    Table(columns, rows).print(console, ruled=False)
    if description.get("n_active", description["n_params"]) != description["n_params"]:
        say(console, f"parameters per token      {description['n_active']:,}")
    memory = ", ".join(f"{part} {size / 2**30:.2f} GiB" for part, size in description["memory"].items())
    if "flops_per_token" in description:
        say(console, f"training FLOPs per token  {description['flops_per_token']:.4g}")
    say(console, f"training memory           {memory}, and activations")
    if "kv_cache" in description:
        say(console, f"KV cache                  {description['kv_cache']:,} bytes per token in bf16")
        say(console, f"attention kernel          {description['kernel']}")
    if description.get("stored_kinds"):
        stored = kinds_in_words(description["stored_kinds"])
        say(console, f"weights are stored as     {stored}")
