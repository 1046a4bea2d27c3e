"""Causal attention in bf16 on a CPU: our kernel in C and our blocks of torch's products, over torch's fused kernel.

    python benchmarks/causal_attention.py [--lengths 512 1024 2048 4096] [--rounds 15]

One attention of 12 heads, as many tokens as the longest length whatever the length, queries, keys and values as
projections leave them. Ways alternate within a round; each is divided by torch's kernel of its round, and the median
counts. Errors are those of the gradients of queries, keys and values against float64, the largest of the three, over
that of torch's kernel, on one sequence of 512 tokens.

Results go to ``benchmarks/results/causal_attention.md`` and ``.json``, or where ``--out`` says.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from device import seconds
from record import Record
from torch import Tensor
from torch.nn import functional as F

from birthmark.models.attention.fused import native
from birthmark.models.attention.fused.blockwise import causal_blocks
from birthmark.models.attention.fused.native import causal_tiles

HERE = Path(__file__).parent
HEADS, WIDTHS = 12, (64, 128)
THEIRS = "torch's kernel"

#: (queries, keys, values, scale) → output.
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
WAYS: dict[str, Attention] = {
    THEIRS: lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale),
    "blocks of products": lambda q, k, v, scale: causal_blocks(q, k, v, scale, wants_sums=False)[0],
    "our kernel": lambda q, k, v, scale: causal_tiles(q, k, v, scale, wants_sums=False)[0],
    "our kernel, with log-sum-exp and squares": lambda q, k, v, scale: causal_tiles(q, k, v, scale, wants_sums=True)[0],
}


def inputs(n_sequences: int, length: int, width: int) -> list[Tensor]:
    """Draw queries, keys, values and the upstream gradient, ``[B, H, T, K]``."""
    generator = torch.Generator().manual_seed(0)
    shape = (n_sequences, length, HEADS, width)
    return [torch.randn(shape, generator=generator).bfloat16().transpose(1, 2) for _ in range(4)]


def gradients(way: Attention, tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients of queries, keys and values."""
    *qkv, d_out = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]
    return list(torch.autograd.grad(way(*leaves, qkv[0].shape[-1] ** -0.5), leaves, d_out))


def errors(width: int) -> dict[str, float]:
    """Return the largest relative error of a gradient, by way."""
    tensors = inputs(1, 512, width)
    exact = gradients(WAYS[THEIRS], [x.double() for x in tensors])
    return {
        name: max(
            float((g.double() - e).norm() / e.norm()) for g, e in zip(gradients(way, tensors), exact, strict=True)
        )
        for name, way in WAYS.items()
    }


def times(tensors: list[Tensor], backward: bool, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by way."""
    *qkv, _ = tensors
    scale = qkv[0].shape[-1] ** -0.5
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for round_ in range(rounds + 1):
        for name, way in WAYS.items():
            if backward:
                took = seconds(lambda way=way: gradients(way, tensors), "cpu")  # type: ignore[misc]
            else:
                with torch.no_grad():
                    took = seconds(lambda way=way: way(*qkv, scale), "cpu")  # type: ignore[misc]
            if round_:  # the first one warms up
                found[name].append(took)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "causal_attention", help="without a suffix")
    args = parser.parse_args(arguments)
    if why := native.why_not():
        parser.error(f"the kernel in C does not run here: {why}")
    record = Record(args.out, "Causal attention in bf16 on a CPU")
    about = machine.describe("cpu") | {"threads": str(torch.get_num_threads())}
    for width in WIDTHS:
        part = f"heads of {width}"
        command = f"python benchmarks/causal_attention.py --lengths {' '.join(map(str, args.lengths))}"
        record.begin(part, f"{command} --rounds {args.rounds}", about, [str(length) for length in args.lengths])
        of = errors(width)
        for name in WAYS:
            record.add(
                part, {"table": "gradients", "case": name, "error": of[name], "over torch's": of[name] / of[THEIRS]}
            )
        for length in args.lengths:
            n_sequences = max(1, max(args.lengths) // length)
            for backward in (False, True):
                found = times(inputs(n_sequences, length, width), backward, args.rounds)
                for name, took in found.items():
                    ratios = [ours / theirs for ours, theirs in zip(took, found[THEIRS], strict=True)]
                    low, middle, high = statistics.quantiles(ratios, n=4)
                    row = {"case": name, "T": length, "sequences": n_sequences, "ms": 1000 * statistics.median(took)}
                    row |= {"over torch's": middle, "quartiles": f"{low:.2f}–{high:.2f}"}
                    record.add(part, {"table": "forward and backward" if backward else "forward", **row})
            record.done(part, str(length))
    print(record.markdown())


if __name__ == "__main__":
    main()
