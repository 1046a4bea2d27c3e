"""Speed of writing of a model exported with our own code, against the native class of the same weights.

    python benchmarks/exported_generation.py [--rounds 5] [--threads 1] [--case NAME]

Both folders are written as `birthmark export` does, one with `--own_code`, and opened with `from_pretrained`. Each
writes 64 tokens by `generate`, greedy, behind a prompt of 32 if the case does not say otherwise, with the library's
cache (`DynamicCache`). They alternate in one process; processor seconds of each round are divided, and the median
counts. Limit: at least .9 × the speed of the native class. Results go to ``benchmarks/results/exported_generation.md``,
or where ``--out`` says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.exchange.pretrained import write_pretrained
from birthmark.models.exchange.written_layout import layout_of

HERE = Path(__file__).parent
#: 58M parameters, 41M without the table; heads of 64.
SHAPE = {"d_model": 512, "n_layers": 8, "n_heads": 8, "d_ff": 1376, "vocab_size": 32_000, "max_seq_len": 1024}
NEW_TOKENS, LIMIT = 64, 0.9


@dataclass(frozen=True)
class Case:
    """One model with its input."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    n_sequences: int = 1
    prompt: int = 32
    padding: int = 0
    """Number of padding tokens before the first sequence."""
    n_kv_heads: int | None = None


CASES = {
    "LLaMA": Case(),
    "LLaMA, prompt of 512": Case(prompt=512),
    "LLaMA, 8 sequences": Case(n_sequences=8),
    "LLaMA, 8 sequences, one padded": Case(n_sequences=8, padding=9),
    "LLaMA, two key/value heads": Case(n_kv_heads=2),
    "Mistral, window of 64": Case(AttentionConfig(window=64)),
    "Qwen3, norms of queries and keys": Case(AttentionConfig(qk_norm="head")),
}


def opened(case: Case, folder: Path) -> dict[str, Any]:
    """Open the same birth as the native class and as our exported code."""
    config = ModelConfig(**SHAPE, mlp="swiglu", n_kv_heads=case.n_kv_heads, attention=case.attention)
    parameters, found = dict(born(config, 0).named_parameters()), {}
    for name, own in (("native", False), ("ours", True)):
        write_pretrained(config, parameters, folder / name, layout=layout_of(config, own_code=own))
        model = AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=own).eval()
        # Weights lie in the mapped file, where the length of its header decides how they are aligned: up to a fifth of
        # a product's time, by chance.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        found[name] = model
    return found


def seconds(model: Any, tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Generate, and return the processor seconds with the generated tokens."""
    start = time.process_time()
    written_BT = model.generate(
        tokens_BT, attention_mask=mask_BT, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return time.process_time() - start, written_BT


@torch.no_grad()
def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Return the seconds of both, and the speed of ours over the native class's."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(1, SHAPE["vocab_size"], (case.n_sequences, case.prompt), generator=generator)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[0, : case.padding] = 0
    with tempfile.TemporaryDirectory() as folder:
        models = opened(case, Path(folder))
        written = [seconds(model, tokens_BT, mask_BT)[1] for model in models.values()]
        times: list[dict[str, float]] = []
        for _ in range(rounds):
            times.append({name: seconds(model, tokens_BT, mask_BT)[0] for name, model in models.items()})
    # Newborn logits lie close together: one rounding may choose another token, and all behind it differ.
    same = (written[0] == written[1])[:, case.prompt :].float().mean().item()
    ratios = sorted(row["native"] / row["ours"] for row in times)
    return {
        "native": statistics.median(row["native"] for row in times),
        "ours": statistics.median(row["ours"] for row in times),
        "speed": statistics.median(ratios),
        "range": (ratios[0], ratios[-1]),
        "same": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "exported_generation.md")
    options = parser.parse_args()
    from machine import write_page

    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    lines = [
        "# Generation of exported models",
        "",
        f"64 tokens, greedy, float32, {options.threads} thread. Speed: ours over the native class, median of "
        f"{options.rounds} rounds (least to most); the limit is {LIMIT}. Seconds are of the processor.",
        "",
        "| case | native, s | ours, s | speed | limit | same tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name in options.case or CASES:
        row = measured(CASES[name], options.rounds)
        low, high = row["range"]
        lines.append(
            f"| {name} | {row['native']:.2f} | {row['ours']:.2f} | {row['speed']:.2f} ({low:.2f}–{high:.2f}) | "
            f"{'met' if row['speed'] >= LIMIT else 'missed'} | {100 * row['same']:.0f} % |"
        )
        print(lines[-1], flush=True)
    write_page(options.out, lines, load)


if __name__ == "__main__":
    main()
