"""Configs of measurements during a run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from ..schema import SEEDS, outside

Probe = Literal["random", "text"]
OnError = Literal["skip", "raise"]
AttentionWeights = Literal["blocks", "walk"]

#: Sequences of held-out text that a run measures by default: the sinks of text, for an eighth of what random tokens
#: cost.
TEXT_SEQUENCES = 32
#: Sequences of a probe without which there is no variance.
FEWEST_SEQUENCES = 2
#: Sequences of one forward pass where nothing else is asked for; on a CPU, whose caches hold little, the best.
BATCH_SIZE = 64
#: Births of other seeds as a control: no more are needed, and each costs a pass.
MOST_STRANGERS = 1000
#: Steps that grow by less are almost every step of a run's beginning.
_LEAST_FACTOR = 1.01


@dataclass(frozen=True)
class FingerprintConfig:
    """The lineage test against the run's own birth and against strangers (definitions §10), with every snapshot."""

    enabled: bool = False
    """Take it."""

    n_inputs: int = 500
    """Random sequences that births and checkpoints are compared on."""

    seq_len: int = 32
    """Tokens in one of them."""

    probe_seed: int = 0
    """Seed of the sequences, and of nothing else."""

    batch_size: int = 64
    """Sequences in one forward pass."""

    n_strangers: int = 2
    """Births of the same config from other seeds (init_seed + 1, + 2, …) to compare with, as controls."""

    def problems(self) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy."""
        bounds = {
            "n_inputs": (10, 1 << 24),
            "seq_len": (1, 1 << 27),
            "batch_size": (1, 1 << 24),
            "n_strangers": (0, MOST_STRANGERS),
            "probe_seed": SEEDS,
        }
        return outside("snapshot.fingerprint", self, bounds)


@dataclass(frozen=True)
class SnapshotConfig:
    """The bias snapshot taken at birth, at every checkpoint and at the end."""

    enabled: bool = True
    """Take snapshots."""

    probes: list[Probe] | None = None
    """Inputs to measure on: ``random`` (uniform tokens; always there, it defines the seed direction) and ``text``
    (held-out sequences of the corpus; its figures are logged as bias_text/…). By default random tokens, and where the
    run reads text, 32 sequences of it or as many as there are; named here, n_sequences of each."""

    n_sequences: int = 256
    """Sequences in a probe."""

    seq_len: int = 64
    """Tokens in a probe sequence."""

    probe_seed: int = 0
    """Seed of the random probe, and of nothing else."""

    steps: list[int] = field(default_factory=list)
    """Further optimizer steps to take snapshots at, beside those of checkpoints. Validation comes with every one."""

    factor: float | None = None
    """Further snapshots at steps that grow by this factor, rounded: ``2`` takes them at 1, 2, 4, 8, …; what random
    initialisation did to a model changes most in its first steps."""

    batch_size: int | None = None
    """Probe sequences in one forward pass; the figures do not depend on it. By default 64, and on a GPU as many as keep
    it busy: 65,536 tokens, fewer in wide models."""

    n_strangers: int = 4
    """Births of the same config from other seeds (init_seed + 1, + 2, …) that alignment and persistence are also
    measured against, as controls. Each costs one more pass over the probe, at birth alone."""

    sink_epsilon: float = 0.3
    """Importance above which a key counts as a sink in the sink rate."""

    top_k: int = 50
    """Preferred tokens that the ranked list shows."""

    metrics: list[str] = field(default_factory=list)
    """Your own metrics, ``module:Class`` each: a torchmetrics.Metric that declares its quantities, from the working
    directory or installed (docs/extending.md). They are recorded, logged and drawn like built-in ones."""

    attention_weights: AttentionWeights = "blocks"
    """Way of reading attention weights: ``blocks`` of queries at a time; ``walk``, on a GPU, their sums alone, by
    kernels in Triton, which save memory and no time (docs/gpu.md). Attention that these do not run (not a causal
    softmax, heads over 128 channels, float64) keeps the blocks."""

    gradients: bool = False
    """Measure the gradient of the loss too: its norm by position, layer and module, from one more pass forwards and
    backwards over the probe, the text if there is one (definitions §16)."""

    on_error: OnError | None = None
    """Reaction to something that cannot be measured or written: ``skip`` goes on without it, with a warning and a note
    in the snapshot or in not_measured.json; ``raise`` ends the training. By default ``birthmark pretrain`` raises, and
    callbacks in a training of your own skip.
    """

    fingerprint: FingerprintConfig = field(default_factory=FingerprintConfig)
    """The lineage test."""

    def sequences(self, *, reads_text: bool) -> dict[Probe, int]:
        """Return the number of sequences of each probe, of a run that reads text or none."""
        if self.probes is not None:
            return dict.fromkeys(self.probes, self.n_sequences)
        found: dict[Probe, int] = {"random": self.n_sequences}
        return found | {"text": min(TEXT_SEQUENCES, self.n_sequences)} if reads_text else found

    @property
    def on_any_device(self) -> int:
        """``batch_size``, or the number that suits every device."""
        return self.batch_size or BATCH_SIZE

    def asks(self, step: int) -> bool:
        """Return True if ``steps`` or ``factor`` request a snapshot after this optimizer step."""
        if step in self.steps:
            return True
        if self.factor is None or step < 1:
            return False
        nearest = round(math.log(step) / math.log(self.factor))
        return any(round(self.factor**power) == step for power in (nearest - 1, nearest, nearest + 1) if power >= 0)

    def problems(self, n_positions: int | None = None) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy.

        ``n_positions``: tokens that the model can read at once; None: any number.
        """
        bounds = {
            "n_sequences": (2, 1 << 24),
            "seq_len": (2, 1 << 27),
            "n_strangers": (0, MOST_STRANGERS),
            "top_k": (1, 1 << 26),
            "probe_seed": SEEDS,
        }
        if self.batch_size is not None:
            bounds["batch_size"] = (1, 1 << 24)
        found = outside("snapshot", self, bounds)
        if n_positions is not None and self.seq_len > n_positions:
            found.append(
                f"snapshot.seq_len is {self.seq_len}: this model has {n_positions} positions; give at most "
                f"{n_positions}"
            )
        if self.gradients and self.seq_len < 3:
            found.append(
                f"snapshot.seq_len is {self.seq_len}: snapshot.gradients compares position 0 with others that predict "
                "a token; give at least 3, or leave it out"
            )
        found += [
            f"snapshot.steps has {step}: give steps of at least 1; at birth there is a snapshot anyway"
            for step in dict.fromkeys(self.steps)
            if step < 1
        ]
        if self.factor is not None and not _LEAST_FACTOR <= self.factor <= 1e6:
            found.append(f"snapshot.factor is {self.factor:g}: give at least {_LEAST_FACTOR} and at most 10⁶, or null")
        if self.probes is not None and "random" not in self.probes:
            found.append("snapshot.probes lacks 'random': the seed direction is defined on it; add it")
        if not 0 < self.sink_epsilon < 1:
            found.append(f"snapshot.sink_epsilon is {self.sink_epsilon}: give a number between 0 and 1")
        for i, name in enumerate(self.metrics):
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
                found.append(f"snapshot.metrics has {name!r}: give module:Class")
            elif name in self.metrics[:i]:
                found.append(f"snapshot.metrics has {name!r} twice: give it once")
        return found + self.fingerprint.problems()
