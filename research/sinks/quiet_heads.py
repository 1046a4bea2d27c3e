"""Attention of idle heads, which may be parked on a key to be quiet: the output of a block that has nothing to do, and
the effect of silencing its heads there, or of spreading their attention evenly over all keys.

    birthmark ablate sinks_quiet --out STUDY
    python research/sinks/quiet_heads.py STUDY

Reads the last checkpoint of every run of the study and asks it on held-out samples of the backcopy task. A query is
*idle* where its token is no trigger. At idle queries alone, the outputs of all heads of one block are replaced: by 0
(*silent*), or by the output of even attention, amplified as the block does (*even*). Prints a row for each arm and
block, means over seeds and their range: mean attention of idle queries on position 0; the RMS of what the attention
adds to the residual stream at idle queries, as trained and with even attention, over that at triggers; and how much the
losses rise, in nats.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import birthmark as bm
from birthmark.data.backcopy import BackCopy, trigger_mask
from birthmark.models.attention.aggregation import AnalyticCalibration
from birthmark.models.attention.fused.backends import over_heads
from birthmark.models.attention.normalisers import WeightedSum
from birthmark.models.decoder import Block, Decoder
from birthmark.trainer.module import next_token_losses

SAMPLES = 256
Idle = Literal["as trained", "silent", "even"]


class Row(NamedTuple):
    """Row of one block of one run."""

    mass: float
    size: float
    even_size: float
    silent_idle: float
    silent_trigger: float
    even_idle: float
    even_trigger: float


HEADINGS = (
    "idle mass on 0", "idle size", "with even attention", "silent: idle loss", "silent: trigger loss",
    "even: idle loss", "even: trigger loss",
)  # fmt: skip


@dataclass
class Seen:
    """Observations of a block in one pass."""

    mass: float = 0.0
    idle_size: float = 0.0
    trigger_size: float = 0.0


def even_outputs(aggregate: nn.Module, v_BGSK: Tensor, n_heads: int) -> Tensor:
    """Compute head outputs ``[B, H, T, K]`` of attention that is even over the visible keys, calibrated as the block
    is.
    """
    v_BHSK = over_heads(v_BGSK, n_heads)
    n_T1 = torch.arange(1, v_BHSK.shape[2] + 1, dtype=v_BHSK.dtype)[:, None]
    o_BHTK = v_BHSK.cumsum(2) / n_T1
    # Calibration without correlation multiplies by √n_eff, and even attention has as many effective keys as it sees.
    return o_BHTK * n_T1.sqrt() if isinstance(aggregate, AnalyticCalibration) else o_BHTK


@contextmanager
def replaced(block: Block, idle: Idle, idle_BT: Tensor) -> Iterator[Seen]:
    """Replace the outputs of a block's heads at idle queries, before a gate."""
    seen = Seen()

    def change(aggregate: nn.Module, args: tuple[Any, ...], o_BHTK: Tensor) -> Tensor:
        weighted, v_BGSK = args
        assert isinstance(weighted, WeightedSum)
        idle_BHT = idle_BT[:, None].expand(o_BHTK.shape[:3])
        on_first_BHT = weighted.rows(0, o_BHTK.shape[2])[..., 0]
        # The first query has no other key.
        seen.mass = float(on_first_BHT[:, :, 1:][idle_BHT[:, :, 1:]].mean())
        if idle == "as trained":
            return o_BHTK
        new_BHTK = even_outputs(aggregate, v_BGSK, o_BHTK.shape[1]) if idle == "even" else torch.zeros_like(o_BHTK)
        return torch.where(idle_BHT[..., None], new_BHTK, o_BHTK)

    def look(attention: nn.Module, args: tuple[Any, ...], y_BTD: Tensor) -> None:
        seen.idle_size, seen.trigger_size = (float(y_BTD[at].square().mean().sqrt()) for at in (idle_BT, ~idle_BT))

    handles = [block.attn.aggregate.register_forward_hook(change), block.attn.register_forward_hook(look)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def rows_of(model: Decoder, samples: Tensor) -> list[Row]:
    """Return a row for each block, given samples of the task ``[B, T + 1]``."""
    idle_BT = ~trigger_mask(samples[:, :-1])

    def losses(block: Block, idle: Idle) -> tuple[Seen, float, float]:
        with replaced(block, idle, idle_BT) as seen:
            loss_BT = next_token_losses(model, samples)
        return seen, float(loss_BT[idle_BT].mean()), float(loss_BT[~idle_BT].mean())

    rows = []
    for block in model.blocks:
        assert isinstance(block, Block)
        trained, idle_loss, trigger_loss = losses(block, "as trained")
        _, *silent = losses(block, "silent")
        evenly, *even = losses(block, "even")
        rows.append(
            Row(
                trained.mass,
                trained.idle_size / trained.trigger_size,
                evenly.idle_size / trained.trigger_size,
                silent[0] - idle_loss,
                silent[1] - trigger_loss,
                even[0] - idle_loss,
                even[1] - trigger_loss,
            )
        )
    return rows


def rows_of_run(run: Path) -> list[Row]:
    """Return the rows of a run's last checkpoint."""
    model = bm.load(run, on="cpu").module
    assert isinstance(model, Decoder)
    task = BackCopy(model.config.vocab_size, model.config.max_seq_len, bm.Run(run).config.data.data_seed, "val")
    return rows_of(model, torch.from_numpy(task.batch(0, SAMPLES)))


def cell(values: np.ndarray) -> str:
    """Format mean and range."""
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of the study's runs: ARM/seed-N")
    study = parser.parse_args().study
    print(f"| arm | block | runs | {' | '.join(HEADINGS)} |")
    print("|---" * (len(HEADINGS) + 3) + "|")
    runs = sorted(run.parent for run in study.glob("*/seed-*/birth.json"))
    for arm in dict.fromkeys(run.parent for run in runs):
        values_RLX = np.array([rows_of_run(run) for run in runs if run.parent == arm])
        for layer in range(values_RLX.shape[1]):
            cells = [cell(values_RLX[:, layer, number]) for number in range(len(HEADINGS))]
            print(f"| {arm.name} | {layer + 1} | {len(values_RLX)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
