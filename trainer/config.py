"""Config of training, and of the whole run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from ..callbacks.config import LogConfig
from ..data.batch_sizes import BatchRamp, BatchShares, BatchSizes
from ..data.config import DataConfig, is_remote
from ..errors import UsageError
from ..evaluation.config import EvalConfig
from ..measure.config import SnapshotConfig
from ..models.adapter_config import AdapterConfig
from ..models.config import ModelConfig
from ..schema import SEEDS, outside
from ..urls import keep_credentials
from .optimizers.schedules import SCHEDULES, ScheduleName, read_row, unread_fields
from .optimizers.table import (
    OPTIMIZERS,
    OptimizerConfig,
    OptimizerName,
    StateDtype,
    UpdateScale,
    optimizer_strategy_problem,
)
from .strategies.table import STRATEGIES, StrategyName, context_problems, strategy_problems

#: Bounds of a denominator's offset: less is 0 in float32, and beside more nothing is left of a gradient.
_EPS = (1e-44, 1e6)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate over time."""

    name: OptimizerName = "adamw"
    """AdamW; ``nadam``, the same with Nesterov momentum; ``sgd`` with momentum beta1; ``adafactor``, whose second
    moments are those of rows and columns; ``muon``, whose momentum is orthogonalised, and ``soap``, Adam in the
    eigenbasis of Shampoo's preconditioner: both step matrices, and AdamW the rest; or ``lion``, the sign of a momentum.
    adafactor, muon and soap step whole matrices, which strategies that shard their state cannot give them; to muon
    ``fsdp2`` can. Each refuses fields that it does not read."""

    lr: float = 1e-3
    """Peak learning rate."""

    adamw_lr: float | None = None
    """For ``muon`` and ``soap``: peak learning rate of the parameters that AdamW steps: tables, output head, gains and
    biases. By default lr.
    """

    weight_decay: float = 0.1
    """Weight decay of matrices, embeddings and head; gains and biases have none. Decoupled from the gradient, but for
    ``sgd``."""

    adamw_weight_decay: float | None = None
    """For ``muon`` and ``soap``: weight decay of embeddings and head. By default weight_decay."""

    warmup_steps: int = 50
    """Steps over which the learning rate rises linearly to lr."""

    warmup_tokens: int = 0
    """In place of warmup_steps: tokens over which the learning rate rises to lr, in proportion to those seen."""

    schedule: ScheduleName = "cosine"
    """After the warm-up: half a cosine down to min_lr_ratio; ``wsd`` (warm-up, stable, decay) stays at lr and falls
    linearly over the last decay_ratio of the run; or stays at lr. Each refuses fields that it does not read."""

    min_lr_ratio: float = 0.1
    """For ``cosine`` and ``wsd``: learning rate at the last step over lr."""

    decay_ratio: float = 0.2
    """For ``wsd``: share of max_steps that the decay takes; at most the steps that the warm-up leaves."""

    beta1: float = 0.9
    """First-moment decay of ``adamw``, ``nadam`` and ``soap``, and of the parameters that AdamW steps beside ``muon``;
    momentum of ``sgd``; for ``lion`` the weight of its momentum in an update.
    """

    beta2: float = 0.95
    """Second-moment decay of the same; for ``lion`` the decay of its momentum."""

    eps: float = 1e-8
    """Denominator offset of ``adamw``, ``nadam`` and ``soap``, and of what AdamW steps beside ``muon``."""

    momentum: float = 0.95
    """For ``muon``: decay of the momentum."""

    update_scale: UpdateScale = "adamw"
    """For ``muon``: factor on the learning rate of a matrix. ``adamw``: .2·√max(rows, columns), so that updates are as
    large as AdamW's, whose lr and weight_decay fit (arXiv 2502.16982). ``spectral``: √max(1, rows/columns), Keller
    Jordan's, with an lr near .02.
    """

    precondition_every: int = 10
    """For ``soap``: steps between two updates of its eigenbases."""

    grad_clip: float = 1.0
    """Largest norm of the whole gradient; longer ones are scaled down to it. 0 turns clipping off."""

    clip_in_step: bool = False
    """For ``adamw``, but not under DeepSpeed: the fused step scales gradients as it reads them, and no pass over them
    comes before it. The last bits differ: a quotient is rounded in place of a product."""

    state_dtype: StateDtype = "fp32"
    """For ``adamw``, but not under DeepSpeed: type of both moments between steps, which compute in float32. ``bf16``
    keeps 4 bytes per parameter in place of 8. The second moment is rounded at random, by the step and the place alone:
    to the nearest it would stall, since bf16 loses changes below 1/512."""

    z_loss: float = 0.0
    """Coefficient of the z-loss, the mean squared log-sum-exp of the logits, which is added to what training minimises
    and keeps logits near 0 (PaLM, arXiv 2204.02311: 1e-4). It has a curve of its own; losses stay the cross-entropy."""

    ema: float | None = None
    """Decay per step of an exponential moving average of the weights after each step, as .999, without the bias to the
    birth that the first steps would have. Checkpoints hold it; ``RUN@ema`` names it; figures of it begin with ``ema/``.
    By default there is none."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """The row of the table of optimizers that ``name`` chooses, with its fields."""
        return read_row(OPTIMIZERS, self.name, vars(self))

    def problems(self) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy."""
        found = [
            f"optim.{name} is {value}: give a number of at least 0"
            for name in ("lr", "adamw_lr", "weight_decay", "adamw_weight_decay", "grad_clip", "z_loss")
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf")
        ]
        if not 0 <= self.warmup_steps <= 10**10:
            found.append(f"optim.warmup_steps is {self.warmup_steps}: give a number of at least 0 and at most 10¹⁰")
        if not 0 <= self.warmup_tokens <= 10**18:
            found.append(f"optim.warmup_tokens is {self.warmup_tokens}: give a number of at least 0 and at most 10¹⁸")
        if self.warmup_tokens and self.warmup_steps not in (0, OptimConfig.warmup_steps):
            found.append(
                f"optim.warmup_tokens is {self.warmup_tokens}, and optim.warmup_steps {self.warmup_steps}: give one of "
                "them"
            )
        for name, value in (("min_lr_ratio", self.min_lr_ratio), ("decay_ratio", self.decay_ratio)):
            if not 0 <= value <= 1:
                found.append(f"optim.{name} is {value}: give a number between 0 and 1")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2), ("momentum", self.momentum)):
            if not 0 <= value < 1:
                found.append(f"optim.{name} is {value}: give a number from 0 to below 1")
        found += outside("optim", self, {"precondition_every": (1, 10**10)})
        if self.ema is not None and not 0 < self.ema < 1:
            found.append(f"optim.ema is {self.ema}: give a number between 0 and 1, both excluded, or nothing")
        found += outside("optim", self, {"eps": _EPS})
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        if self.clip_in_step and not self.grad_clip:
            found.append("optim.clip_in_step is true, but optim.grad_clip is 0, which clips nothing: leave one out")
        found += unread_fields("optimizer", OPTIMIZERS, self.name, vars(self), defaults)
        found += unread_fields("schedule", SCHEDULES, self.schedule, vars(self), defaults)
        return found


#: Seconds that a wait may be limited to: torch counts nanoseconds in 64 bits.
_LONGEST_S = 10_000_000


@dataclass(frozen=True)
class TrainerConfig:
    """Length, batch, precision and cadence of a run."""

    max_steps: int = 1000
    """Optimizer steps."""

    micro_batch_size: int = 16
    """Sequences in one forward and backward pass on one device, at most: processes share global_batch_size in
    micro-batches of almost one size, in which every sequence counts alike."""

    global_batch_size: int = 16
    """Sequences in one optimizer step, over all devices and accumulated micro-batches."""

    batch_ramp: BatchRamp = field(default_factory=BatchRamp)
    """Growth to global_batch_size: immediate, or from a smaller size, which DeepSpeed's strategies do not support."""

    precision: Literal["auto", "fp32", "bf16", "fp8"] = "fp32"
    """``fp32``, or ``bf16`` autocast over float32 weights; ``fp8``, the same with the products of the blocks' linear
    maps in fp8, by torchao, on GPUs from compute capability 8.9 on. ``auto``: bf16 where the device has units for it
    (GPUs from compute capability 8.0 on, CPUs with AVX-512 BF16 or AMX), else fp32; decided when the run begins, and
    kept when it goes on elsewhere."""

    residual: Literal["fp32", "bf16"] = "fp32"
    """Type of the residual stream in training and validation with precision ``bf16`` or ``fp8``. ``bf16`` halves what
    blocks read, write and keep of it; each of its sums, and the gains of norms, are rounded to eight bits. Snapshots of
    a single process's weights are float32 either way."""

    matmul: Literal["ieee", "tf32"] = "ieee"
    """Precision of float32 matrix products on a GPU: full, or rounded to TF32, ten bits of fraction and several times
    as fast. Snapshots use it too.
    """

    deterministic: bool = False
    """On a GPU: choose kernels whose results are the same bit for bit in every rerun and resume, which are slower. On a
    CPU they are so anyway."""

    compile: Literal["no", "step", "blocks"] = "no"
    """Part that ``torch.compile`` compiles: the whole training ``step``, if no strategy shards the weights; or the
    decoder's ``blocks`` one by one, which compiles once for all of them, but not under ``zero3``. Snapshots always run
    uncompiled.
    """

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Values that each block keeps for its backward pass: all; the results of its matrix products and attention,
    recomputing the rest; or its input alone.
    """

    strategy: StrategyName = "single"
    """Distribution of the run over the processes that a launcher starts (docs/cluster.md). ``single``: there is one.
    ``ddp``: each holds the whole model. ``fsdp2``: weights, gradients and optimizer state are sharded over them.
    DeepSpeed's ``zero1`` shards the optimizer's state, ``zero2`` the gradients too, ``zero3`` the weights too.
    """

    replicas: int = 1
    """For ``fsdp2``: groups of processes that each hold the whole model, sharded over its group; 1: one group
    of all.
    """

    gather: Literal["auto", "fp32", "bf16"] = "auto"
    """For ``fsdp2`` and ``zero3``: type of the weights in a pass, gathered from their float32 originals. ``auto``:
    ``bf16`` if precision is, else ``fp32``. ``bf16`` halves the traffic and memory of gathered blocks and head, and
    rounds no activations: embeddings stay float32. Snapshots then measure the rounded weights and say so.
    """

    reduce: Literal["fp32", "bf16"] = "fp32"
    """For ``fsdp2``: type in which gradients are sent when processes average them. ``bf16`` halves the traffic, and
    rounds gradients; with gather ``bf16`` it also rounds the sums over the micro-batches of a step.
    """

    accumulate: Literal["whole", "sharded"] = "whole"
    """For ``fsdp2`` and steps of several micro-batches: each process sums their gradients ``whole``, 4 bytes per
    parameter, and they are reduced once per step; or ``sharded``: they are reduced after every micro-batch.
    """

    context_parallel: int = 1
    """Not under ``zero3``: processes that divide every sequence among them, for sequences whose activations one cannot
    hold; neighbouring processes form a group and train on the same samples. 1: each holds whole sequences.
    Snapshots and validation have whole sequences in any case.
    """

    offload: Literal["none", "cpu", "nvme"] = "none"
    """For ``zero1`` to ``zero3``: place of the optimizer's state and, with ``zero3``, of the weights between passes."""

    offload_dir: str = ""
    """Folder on the drive that ``offload: nvme`` writes to."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run; ``auto`` takes a GPU if there is one."""

    log_every: int = 10
    """Optimizer steps between lines of training metrics."""

    max_skipped: int = 10
    """A step whose loss or gradient is not finite is skipped: it leaves weights and optimizer state as they were. More
    such steps than this, over the whole run, end it; 0: the first one does."""

    checkpoint_every: int = 250
    """Optimizer steps between checkpoints; validation and the bias snapshot come with each;
    ``snapshot.steps`` and ``snapshot.factor`` ask for more of these."""

    keep_last: int | None = None
    """The last checkpoints that are kept; by default all are."""

    keep_every: int | None = None
    """With keep_last: checkpoints at multiples of so many optimizer steps are kept too."""

    checkpoint_to: str = ""
    """URL of a folder in a store, any that fsspec knows, as ``s3://bucket/runs/my-run``: whole checkpoints and the
    run's small files are copied there beside training, and ``keep_last`` holds there too. Commands read the run from
    it, and ``--resume URL`` goes on with it elsewhere (docs/cluster.md)."""

    profile: list[int] = field(default_factory=list)
    """Steps of which rank 0 writes a trace into the run's folder profile, as ``[10, 11, 12]``: those that follow one
    another into one file, and on a GPU a snapshot of its memory too."""

    val_sequences: int = 64
    """Validation sequences (model.max_seq_len tokens each); fewer where the corpus has fewer."""

    timeout_s: float = 120.0
    """Seconds after which a run ends if one of its processes does not answer, or is at one micro-batch, or at the data
    for one, for longer; the run then says which process, where and in what. Birth, set-up, the first step of a start,
    validation, a snapshot, a checkpoint and the end may each take fifteen times as long. 0: no limit, as for a
    debugger."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint_to", keep_credentials(self.checkpoint_to))

    @property
    def batch_sizes(self) -> BatchSizes:
        """Size of the global batch at every step."""
        return BatchSizes(self.global_batch_size, self.batch_ramp)

    @property
    def gathers_in(self) -> Literal["fp32", "bf16"]:
        """Resolved value of ``gather``."""
        if self.gather != "auto":
            return self.gather
        return "bf16" if self.precision in ("bf16", "fp8") and self.reads("gather") else "fp32"

    def reads(self, name: str) -> bool:
        """Return True if ``strategy`` reads a field that only some strategies read."""
        return name in STRATEGIES[self.strategy].reads

    def data_shares(self, n_processes: int) -> int:
        """Return the number of parts that ``n_processes`` divide a batch into: one for each context group."""
        return max(1, n_processes // self.context_parallel)

    def batch_shares(self, n_processes: int, step: int | None = None) -> BatchShares:
        """Return the shares of ``n_processes`` in the batch of ``step``, counted from 0; by default in a full one."""
        size = self.global_batch_size if step is None else self.batch_sizes.size(step)
        return BatchShares(size, self.micro_batch_size, self.data_shares(n_processes))

    def shared_by(self, n_processes: int) -> TrainerConfig:
        """Return this config for ``n_processes``, with the size of their largest micro-batch.

        Raises:
            UsageError: there are more processes, or context groups, than sequences.
        """
        n_shares = self.data_shares(n_processes)
        if self.batch_ramp.start and self.batch_ramp.start < n_shares:
            raise UsageError(
                f"trainer.batch_ramp.start {self.batch_ramp.start} is less than {n_shares} processes: give "
                f"{n_shares} or more, or start {self.batch_ramp.start}"
            )
        return dataclasses.replace(self, micro_batch_size=self.batch_shares(n_processes).micro_batch_size)

    def problems(self) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy."""
        bounds = {
            "max_steps": (1, 10**10),
            "micro_batch_size": (1, 1 << 24),
            "global_batch_size": (1, 1 << 32),
            "log_every": (1, 10**10),
            "max_skipped": (0, 10**10),
            "checkpoint_every": (1, 10**10),
            "val_sequences": (1, 1 << 32),
        }
        found = outside("trainer", self, bounds)
        found += [
            f"trainer.profile has step {step}: give steps from 1 to trainer.max_steps ({self.max_steps})"
            for step in dict.fromkeys(self.profile)
            if not 1 <= step <= self.max_steps
        ]
        if len(self.profile) > 100:
            found.append(f"trainer.profile has {len(self.profile)} steps: give at most 100, a trace of each is large")
        elif twice := [step for step in dict.fromkeys(self.profile) if self.profile.count(step) > 1]:
            found.append(f"trainer.profile has step {twice[0]} twice: give it once")
        for name, steps in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if steps is not None and not 1 <= steps <= 10**10:
                found.append(f"trainer.{name} is {steps}: give at least 1 and at most 10¹⁰, or nothing")
        if self.keep_every is not None and self.keep_last is None:
            found.append(f"trainer.keep_every is {self.keep_every}, but all are kept: give trainer.keep_last too")
        if self.checkpoint_to and not is_remote(self.checkpoint_to):
            found.append(
                f"trainer.checkpoint_to is {self.checkpoint_to}, no URL: give one, as s3://bucket/runs/my-run; run_dir "
                "is the folder here"
            )
        elif self.checkpoint_to.startswith(("http://", "https://")):
            found.append(f"trainer.checkpoint_to is {self.checkpoint_to}, which takes no files: give another store")
        if not 0 <= self.timeout_s <= _LONGEST_S:
            found.append(f"trainer.timeout_s is {self.timeout_s:g}: give 0 (no limit) to {_LONGEST_S:,} seconds")
        found += outside("trainer", self, {"replicas": (1, 1 << 20), "context_parallel": (1, 1 << 16)})
        found += strategy_problems(self.strategy, vars(self))
        found += self.batch_ramp.problems(self.global_batch_size)
        if self.batch_ramp.start and STRATEGIES[self.strategy].engine:
            found.append(
                f"trainer.batch_ramp is given, but {self.strategy} takes as many micro-batches at every step: give "
                "trainer.strategy single, ddp or fsdp2"
            )
        if self.residual == "bf16" and self.precision == "fp32":
            found.append("trainer.residual is bf16, but trainer.precision is fp32: set both to bf16, or neither")
        if self.gather == "bf16" and self.precision == "fp32":
            found.append("trainer.gather is bf16, but trainer.precision is fp32: set both to bf16, or neither")
        if self.offload_dir and self.offload != "nvme":
            found.append(
                f"trainer.offload_dir is {self.offload_dir}, which offload {self.offload} does not read: remove it"
            )
        if self.offload == "nvme" and not self.offload_dir:
            found.append("trainer.offload is nvme: give trainer.offload_dir, a folder on the drive")
        return found


@dataclass(frozen=True)
class RunConfig:
    """Config of a whole pretraining run."""

    name: str = ""
    """Name of the run; by default the config file's own name."""

    run_dir: str = ""
    """Folder that the run writes to; by default runs/NAME. It must not hold a run yet."""

    init_seed: int = 0
    """Seed of every parameter at birth, and of nothing else."""

    init_from: str = ""
    """Start from this model: RUN (its last checkpoint), RUN@STEP or a checkpoint's folder; or one of transformers, a
    folder, GGUF file or hub id (docs/exchange.md). It decides the model, but for max_seq_len, and for text the
    tokenizer; init_seed then decides the strangers alone. The optimizer starts anew. Without a config and optim.lr
    the peak learning rate is what that run had at the checkpoint, at least a tenth of its peak; 3e-5 where the model's
    training is not known. CONFIG@SEED or RUN@0, a birth, stands for that model and init_seed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The decoder."""

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """A small part that is trained in place of the decoder, which then stays as init_from has it (birthmark adapt)."""

    data: DataConfig = field(default_factory=DataConfig)
    """Source of the tokens."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning rate."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length, batch, precision and cadence."""

    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """The bias snapshot."""

    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation while it trains."""

    log: LogConfig = field(default_factory=LogConfig)
    """Experiment tracking."""

    def tokens_after(self, step: int) -> int:
        """Return the number of tokens that the first ``step`` steps train on."""
        return self.trainer.batch_sizes.before(step) * self.model.max_seq_len

    def __post_init__(self) -> None:
        problems = [
            *outside("", self, {"init_seed": SEEDS}),
            *self.data.problems(),
            *self.optim.problems(),
            *self.trainer.problems(),
            *self.snapshot.problems(),
            *self.log.problems(),
            *self.eval.problems(self.trainer.checkpoint_every, self.model.max_seq_len, self.data.path),
            *self._adapter_problems(),
        ]
        if self.trainer.activation_checkpointing != "none" and (
            self.model.attention.calibration.correlation == "estimated"
        ):
            problems.append(
                "trainer.activation_checkpointing computes blocks again, which would move the running moments of "
                "model.attention.calibration.correlation estimated twice: give none, or learned"
            )
        of_run = (self.trainer.context_parallel, self.trainer.compile, self.trainer.activation_checkpointing)
        problems += context_problems(*of_run, self.model)
        if (refused := optimizer_strategy_problem(self.optim.name, self.trainer.strategy)) is not None:
            problems.append(refused)
        if self.optim.clip_in_step and STRATEGIES[self.trainer.strategy].engine:
            problems.append(
                f"optim.clip_in_step is true, but {self.trainer.strategy} clips in an engine of its own: leave it out"
            )
        if self.optim.state_dtype == "bf16" and STRATEGIES[self.trainer.strategy].engine:
            problems.append(
                f"optim.state_dtype is bf16, but {self.trainer.strategy} keeps state in float32: give trainer.strategy "
                "fsdp2, or fp32"
            )
        if self.trainer.val_sequences < len(self.data.sources):
            problems.append(
                f"trainer.val_sequences is {self.trainer.val_sequences}, fewer than the {len(self.data.sources)} of "
                "data.sources, each of which has a validation loss of its own: give more"
            )
        problems += [
            f"data.schedule[{i}].step is {change.step}, where the run is over: give less than trainer.max_steps "
            f"({self.trainer.max_steps}), or leave the change out"
            for i, change in enumerate(self.data.schedule)
            if change.step >= self.trainer.max_steps
        ]
        problems += self._packing_problems()
        if self.eval.is_on and self.model.attention.first_prediction:
            problems.append(
                f"model.attention.prefix is {self.model.attention.prefix}, whose positions see the answers that eval "
                "asks for: leave eval.tasks and eval.texts out"
            )
        longest, fingerprint = self.model.max_seq_len, self.snapshot.fingerprint
        lengths = {
            "snapshot.seq_len": self.snapshot.seq_len if self.snapshot.enabled else 0,
            "snapshot.fingerprint.seq_len": fingerprint.seq_len if fingerprint.enabled else 0,
        }
        problems += [
            f"{name} {length} is longer than model.max_seq_len {longest}: give at most {longest}"
            for name, length in lengths.items()
            if length > longest
        ]
        if problems:
            raise UsageError("; ".join(problems))

    def _adapter_problems(self) -> list[str]:
        """List settings that an adapter excludes."""
        found, kind = self.adapter.problems(), self.adapter.kind
        if self.adapter.is_on and not self.init_from:
            found.append(
                f"adapter.kind is {kind}, but the run starts at a birth, where nothing is to be adapted: give a model "
                "to start from, init_from (birthmark adapt MODEL), or adapter.kind none"
            )
        if self.adapter.is_on and self.trainer.precision == "fp8":
            found.append(
                f"trainer.precision is fp8, but adapter.kind {kind} trains none of the maps that it is for: give bf16"
            )
        if self.adapter.is_of_matrices:
            values, unread = vars(self.optim), OPTIMIZERS[self.optim.name].fields_of_rest
            found += [
                f"optim.{name} is {values[name]}, which AdamW reads for what is no matrix, but adapter.kind {kind} has "
                "nothing else: leave it out"
                for name in unread
                if values[name] != getattr(OptimConfig, name)
            ]
        return found

    def _packing_problems(self) -> list[str]:
        """List parts of a model that padded sequences would mislead."""
        attention, packing, found = self.model.attention, self.data.packing, []
        if packing != "concat" and attention.prefix is not None:
            found.append(
                f"data.packing {packing} with model.attention.prefix: a sequence may hold fewer tokens than a prefix; "
                "give concat, or no prefix"
            )
        if packing != "concat" and attention.calibration.correlation == "estimated" and not attention.documents:
            found.append(
                f"data.packing {packing} with model.attention.calibration.correlation estimated: padding would count "
                "in its running moments; give concat, correlation learned, or model.attention.documents"
            )
        return found
