"""Measurements that predict the cost of 4-bit arithmetic: every arm of the sinks study, on the backcopy task.

    python research/sinks/quantised_arms.py --out quantised-arms [--steps 300] [--batch 16] [--seeds 0,1,2]

Each run is one of `birthmark ablate sinks`, by default smaller (d 32, T 32), trained by a plain loop for fewer steps.
Then it is measured on held-out samples of the task, and its loss is taken again under simulated quantisation. One line
for each run goes to ``OUT/runs.jsonl``; runs that stand there are not trained again. ``OUT/table.md`` ranks the
measurements: Spearman's ρ between each and the rise of the loss, with 95 % intervals from 2,000 resamples of the
*arms*, because seeds of one arm are not independent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from birthmark.data.backcopy import BackCopy
from birthmark.data.probes import random_probe
from birthmark.measure.measurement import measure
from birthmark.measure.quantised.cost import quantisation_costs
from birthmark.measure.quantised.rounding import read_bits
from birthmark.models.birth import born
from birthmark.models.decoder import Decoder
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.trainer.config import RunConfig

STUDY = Path(__file__).resolve().parents[2] / "configs" / "studies" / "sinks.yaml"
BITS = read_bits("w8a8,w4a16,w4a8,w4a4")
#: Measurements to rank, chosen before any result was seen.
PREDICTORS = (
    "loss", "sink_mass", "sink_rate", "secondary_sinks", "attention_entropy", "largest_logit", "key_norm_sink",
    "value_norm_sink", "key_norm_first", "value_norm_first", "residual_kurtosis", "attention_kurtosis", "mlp_kurtosis",
    "residual_inf_norm", "attention_inf_norm", "mlp_inf_norm", "residual_outlier_channels",
    "attention_outlier_channels", "mlp_outlier_channels", "dominance_first", "massive_max", "effective_rank",
    "variance_discrepancy", "n_eff", "super_neurons", "qk_cosine", "inter", "intra",
)  # fmt: skip


def trained(config: RunConfig, steps: int, batch: int) -> Decoder:
    """Train a run's model for so many steps of AdamW at its rate, with its warm-up and constant after it."""
    model = born(config.model, config.init_seed)
    task = BackCopy(config.model.vocab_size, config.model.max_seq_len, config.data.data_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        samples = torch.from_numpy(task.batch(step * batch, batch))
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * min((step + 1) / config.optim.warmup_steps, 1.0)
        model(samples[:, :-1], targets_BS=samples[:, 1:]).objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def one_run(config: RunConfig, steps: int, batch: int) -> dict[str, Any]:
    """Train, measure and quantise one model."""
    model, shape = trained(config, steps, batch), config.model
    held_out = BackCopy(shape.vocab_size, shape.max_seq_len, config.data.data_seed, "val").batch(0, 128)
    costs = quantisation_costs(model, BITS, held_out[:, :-1], random_probe(shape.vocab_size, 128, shape.max_seq_len, 0))
    return {
        "measured": {"loss": costs[0].loss, **measure(model, held_out[:, :-1]).scalars},
        "costs": [dataclasses.asdict(cost) for cost in costs],
    }


def ranked(x: np.ndarray, y: np.ndarray) -> float:
    """Compute Spearman's ρ; NaN if one of them is constant."""
    a, b = rankdata(x), rankdata(y)
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else float("nan")


def correlation(rows: list[dict[str, Any]], name: str, bits: str) -> tuple[float, float, float, int]:
    """Return ρ of a measurement with the rise of the loss, the ends of its 95 % interval, and the number of runs."""
    pairs = [
        (row["arm"], row["measured"][name], next(c["increase"] for c in row["costs"] if c["bits"] == bits))
        for row in rows
        if row["measured"].get(name) is not None
    ]
    arms, x, y = (np.array(column) for column in zip(*pairs, strict=True))
    kept = np.isfinite(x)
    arms, x, y = arms[kept], x[kept], y[kept]
    members = [np.flatnonzero(arms == arm) for arm in dict.fromkeys(arms)]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(2000):
        index = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        drawn.append(ranked(x[index], y[index]))
    low, high = np.nanpercentile(drawn, [2.5, 97.5]) if np.isfinite(drawn).any() else (np.nan, np.nan)
    return ranked(x, y), float(low), float(high), len(x)


def table(rows: list[dict[str, Any]], bits: str) -> str:
    """Format the measurements by the size of their ρ, in Markdown."""
    found = {name: correlation(rows, name, bits) for name in PREDICTORS}
    order = sorted(found, key=lambda name: -np.nan_to_num(abs(found[name][0]), nan=-1.0))
    lines = [f"| measurement | ρ with the cost of {bits} | 95 % | runs |", "|---|---|---|---|"]
    for name in order:
        rho, low, high, n = found[name]
        lines.append(f"| `{name}` | {rho:+.2f} | {low:+.2f} to {high:+.2f} | {n} |")
    return "\n".join(lines)


def arms_table(rows: list[dict[str, Any]]) -> str:
    """Format every arm's loss, sink mass, kurtosis and costs, as means over its seeds."""
    names = ("loss", "sink_mass", "residual_kurtosis")
    headings = ["arm", *names, *map(str, BITS)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        cells = [f"{np.mean([row['measured'][name] for row in of_arm]):.3g}" for name in names]
        for bits in map(str, BITS):
            cost = np.mean([c["increase"] for row in of_arm for c in row["costs"] if c["bits"] == bits])
            cells.append(f"{cost:+.4f}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--d_model", type=int, default=32)
    parser.add_argument("--seq_len", type=int, default=32)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=15.0, help="no run is begun after so many")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    names = ("steps", "batch", "d_model", "seq_len")
    settings = tuple(getattr(arguments, name) for name in names)
    done = {(row["arm"], row["seed"], *(row[name] for name in names)) for row in rows}
    seeds = tuple(int(seed) for seed in arguments.seeds.split(","))
    study = dataclasses.replace(read_arm_study(STUDY), init_seeds=seeds)
    begun = time.monotonic()
    size = {"model.d_model": arguments.d_model}
    size |= dict.fromkeys(("model.max_seq_len", "snapshot.seq_len"), arguments.seq_len)
    for trial in arm_trials(study, arguments.out, size):
        key = trial.arm, trial.seed, *settings
        if key in done or time.monotonic() - begun > 60 * arguments.minutes:
            continue
        row = dict(zip(("arm", "seed", *names), key, strict=True))
        row |= one_run(trial.config, arguments.steps, arguments.batch)
        rows.append(row)
        with file.open("a") as f:
            f.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - begun:6.0f} s  {trial.arm} {trial.seed}", flush=True)
    rows = [row for row in rows if tuple(row[name] for name in names) == settings]
    text = "\n\n".join([*(table(rows, bits) for bits in ("w4a4", "w4a16")), arms_table(rows)])
    (arguments.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
