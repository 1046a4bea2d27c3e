"""Time and peak memory of each method on one pair that is larger than the bench's."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from birthmark.measure.hidden_states import FingerprintProbe
from birthmark.metrics.seedprint import HiddenStates
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

from .evidence import Evidence, gather
from .method import Method, compare
from .pairs import PROBE_LEN

#: 9 million parameters.
LARGER = ModelConfig(d_model=256, n_layers=6, n_heads=8, vocab_size=8192, max_seq_len=64, mlp="swiglu")
N_INPUTS = 300


class Cost(NamedTuple):
    """Cost of one test."""

    method: str
    seconds: float
    """Processor time, without the pass."""
    mib: float | None
    """Peak of the process' memory above the level before the test; None where the system does not say."""


def _memory(field: str) -> float | None:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)


def _forget_peak() -> None:
    """Start measuring the memory peak from now on; free memory that is still held would hide it, so it first goes back
    to the system.
    """
    file = Path("/proc/self/clear_refs")
    if file.is_file():
        ctypes.CDLL(None).malloc_trim(0)
        file.write_text("5")


def costs(methods: Sequence[Method], config: ModelConfig = LARGER, n_inputs: int = N_INPUTS) -> Iterator[Cost]:
    """Measure each method on two births of a config; ranks and all other intermediate results are computed anew for
    each method.
    """
    probe = FingerprintProbe(n_inputs=n_inputs, seq_len=PROBE_LEN)
    a, b = (gather(f"birth {seed}", born(config, seed), probe) for seed in (0, 1))
    for method in methods:
        fresh = [_fresh(model) for model in (a, b)]
        _forget_peak()
        before, start = _memory("VmRSS"), time.process_time()
        compare(method, *fresh)
        seconds, peak = time.process_time() - start, _memory("VmHWM")
        yield Cost(method.name, seconds, None if before is None or peak is None else max(peak - before, 0.0))


def _fresh(model: Evidence) -> Evidence:
    return replace(model, final=HiddenStates(model.final.x_ND))
