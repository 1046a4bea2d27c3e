"""How a model is trained, and the whole run as one config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..callbacks.config import LogConfig, SnapshotConfig
from ..data.config import DataConfig
from ..errors import UsageError
from ..models.config import ModelConfig


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate over time."""

    lr: float = 1e-3
    """Peak learning rate."""

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings; gains and biases have none."""

    warmup_steps: int = 50
    """Steps over which the learning rate rises linearly to lr."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine down to min_lr_ratio; ``wsd`` (warm-up, stable, decay) stays at lr and falls
    linearly over the last decay_ratio of the run; or stays at lr."""

    min_lr_ratio: float = 0.1
    """Learning rate at the last step over lr, for ``cosine`` and ``wsd``."""

    decay_ratio: float = 0.2
    """Share of max_steps that the decay of ``wsd`` takes."""

    beta1: float = 0.9
    """AdamW's first-moment decay."""

    beta2: float = 0.95
    """AdamW's second-moment decay."""

    eps: float = 1e-8
    """AdamW's denominator offset."""

    grad_clip: float = 1.0
    """Largest norm of the whole gradient; longer ones are scaled down to it. 0 turns clipping off."""

    def problems(self) -> list[str]:
        """Everything that makes this config impossible, one line each, with the mend."""
        found = [
            f"optim.{name} is {value}: give a number of at least 0"
            for name, value in (
                ("lr", self.lr),
                ("weight_decay", self.weight_decay),
                ("warmup_steps", self.warmup_steps),
                ("grad_clip", self.grad_clip),
            )
            if not value >= 0
        ]
        for name, value in (("min_lr_ratio", self.min_lr_ratio), ("decay_ratio", self.decay_ratio)):
            if not 0 <= value <= 1:
                found.append(f"optim.{name} is {value}: give a number between 0 and 1")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                found.append(f"optim.{name} is {value}: give a number from 0 to below 1")
        if not self.eps > 0:
            found.append(f"optim.eps is {self.eps}: give a positive number")
        return found


@dataclass(frozen=True)
class TrainerConfig:
    """Length, batch, precision and cadence of a run."""

    max_steps: int = 1000
    """Optimizer steps."""

    micro_batch_size: int = 16
    """Sequences in one forward and backward pass on one device."""

    global_batch_size: int = 16
    """Sequences in one optimizer step, over all devices and accumulated micro-batches."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """``fp32``, or ``bf16`` autocast over float32 weights."""

    compile: bool = False
    """Compile the training step with ``torch.compile``; snapshots always run uncompiled."""

    strategy: Literal["single", "ddp"] = "single"
    """How the run is spread over processes: ``single`` is one; ``ddp`` is as many as torchrun starts, each with the
    whole model and a part of every batch (docs/cluster.md)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; ``auto`` takes a GPU where there is one."""

    log_every: int = 10
    """Optimizer steps between lines of training metrics."""

    checkpoint_every: int = 250
    """Optimizer steps between checkpoints; validation and the bias snapshot come with each."""

    val_sequences: int = 64
    """Validation sequences (model.max_seq_len tokens each); fewer where the corpus has fewer."""

    def problems(self) -> list[str]:
        """Everything that makes this config impossible, one line each, with the mend."""
        counts = {
            "max_steps": self.max_steps,
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "log_every": self.log_every,
            "checkpoint_every": self.checkpoint_every,
            "val_sequences": self.val_sequences,
        }
        found = [f"trainer.{name} is {value}: give at least 1" for name, value in counts.items() if value < 1]
        if not found and self.global_batch_size % self.micro_batch_size:
            found.append(
                f"trainer.global_batch_size {self.global_batch_size} is not a multiple of "
                f"trainer.micro_batch_size {self.micro_batch_size}: change either"
            )
        return found


@dataclass(frozen=True)
class RunConfig:
    """One pretraining run, whole."""

    name: str = ""
    """Name of the run; by default the config file's own name."""

    run_dir: str = ""
    """Folder that the run writes to; by default runs/NAME. It must not hold a run yet."""

    init_seed: int = 0
    """Decides every parameter at birth, and nothing else."""

    init_from: str = ""
    """Start from a checkpoint of transformers in place of a birth: a folder, or a hub id (docs/exchange.md). It decides
    the model, but for max_seq_len, and for text the tokenizer; init_seed then decides the strangers alone."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The decoder."""

    data: DataConfig = field(default_factory=DataConfig)
    """Where tokens come from."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning rate."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length, batch, precision and cadence."""

    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """The bias snapshot."""

    log: LogConfig = field(default_factory=LogConfig)
    """Experiment tracking."""

    def __post_init__(self) -> None:
        problems = [
            *self.data.problems(),
            *self.optim.problems(),
            *self.trainer.problems(),
            *self.snapshot.problems(),
        ]
        longest = self.model.max_seq_len
        if self.snapshot.enabled and self.snapshot.seq_len > longest:
            problems.append(
                f"snapshot.seq_len {self.snapshot.seq_len} is longer than model.max_seq_len {longest}: "
                f"give at most {longest}"
            )
        if problems:
            raise UsageError("; ".join(problems))
