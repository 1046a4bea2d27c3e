"""The model, as a config: every architecture is a value of these dataclasses and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import UsageError

#: Gated MLPs, and the activation of their gate.
GATED = {
    "reglu": "relu",
    "geglu": "gelu",
    "swiglu": "silu",
    "tanhglu": "tanh",
    "bilinear": "identity",
    "relu2glu": "relu2",
}


@dataclass(frozen=True)
class CalibrationConfig:
    """Variance-calibrated attention [BB] (definitions §9); read where attention.aggregation is ``calibrated``."""

    n_eff: Literal["analytic", "exact"] = "exact"
    """Effective number of tokens: ``analytic`` takes t+1 (uniform attention), ``exact`` 1/Σ a² of the weights."""

    direction: Literal["amplify", "attenuate"] = "amplify"
    """``amplify`` multiplies head outputs by √n_eff; ``attenuate`` by √(n_eff/t_ref), so that no factor exceeds 1."""

    t_ref: int | None = None
    """Reference length of ``attenuate``, in tokens; by default model.max_seq_len, the training length."""

    gradient: bool = True
    """Let gradients flow through the exact factor; else it is a constant to the backward pass."""


@dataclass(frozen=True)
class AttentionConfig:
    """Parts of attention."""

    aggregation: Literal["plain", "headnorm", "calibrated"] = "plain"
    """What happens to each head's Σ a·v before the output projection: nothing, head-wise RMSNorm [SO], or variance
    calibration [BB]."""

    aggregation_blocks: list[int] | None = None
    """Blocks (from 0) that ``aggregation`` applies to, the others staying plain; by default all."""

    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Variance calibration's own settings."""

    gate: Literal["none", "head", "channel"] = "none"
    """Multiply head outputs, after ``aggregation``, with a sigmoid of a linear map of the block's input: one number per
    head, or one per channel."""

    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before they turn: over each head's channels with one gain shared by the heads
    (Qwen3), or over all heads' channels together (OLMo-2)."""


@dataclass(frozen=True)
class InitConfig:
    """The distribution at birth of every weight matrix and embedding (gains start at 1, biases at 0)."""

    kind: Literal["fan_in", "normal", "gpt2", "xavier", "kaiming"] = "fan_in"
    """Normal distributions with mean 0 and standard deviation 1/√fan-in (``fan_in``; 1/√d_model for embeddings), std
    (``normal``), std and, for the two maps of each block that write to the residual stream, std/√(2·n_layers)
    (``gpt2``), √(2/(fan-in + fan-out)) (``xavier``), √(2/fan-in) (``kaiming``)."""

    std: float = 0.02
    """Standard deviation of ``normal`` and ``gpt2``."""


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer."""

    d_model: int = 256
    """Width of the residual stream."""

    n_layers: int = 4
    """Number of blocks."""

    n_heads: int = 4
    """Query heads per block."""

    n_kv_heads: int | None = None
    """Key/value heads per block; by default n_heads."""

    head_dim: int | None = None
    """Width of one head; by default d_model/n_heads."""

    d_ff: int | None = None
    """Hidden width of the MLP; by default 4·d_model, and 8/3·d_model rounded up to a multiple of 32 for gated MLPs."""

    vocab_size: int = 4096
    """Rows of the embedding table and of the output head."""

    max_seq_len: int = 256
    """Training length in tokens, and the most positions a learned table holds."""

    norm: Literal["rmsnorm", "layernorm", "none"] = "rmsnorm"
    """Normalisation around attention and the MLP (see norm_placement) and before the output head."""

    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Normalise the input of attention and of the MLP (GPT-2, LLaMA), their output before it is added to the residual
    stream (OLMo-2), or both."""

    parallel_residual: bool = False
    """Attention and MLP read the same residual stream, and their outputs are added together (GPT-NeoX)."""

    norm_eps: float = 1e-5
    """Added to the mean square (rmsnorm, head-wise RMSNorm) or variance (layernorm)."""

    mlp: Literal[
        "relu",
        "gelu",
        "silu",
        "tanh",
        "identity",
        "relu2",
        "gelu_tanh",
        "reglu",
        "geglu",
        "swiglu",
        "tanhglu",
        "bilinear",
        "relu2glu",
    ] = "gelu"
    """Activation of the MLP (relu2: squared ReLU; gelu_tanh: GPT-2's approximation of GELU); the last six are the gated
    forms of the first six, in that order."""

    positions: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    """Positional information: rotary, a learned or a sinusoidal table added to the embeddings, or none."""

    rope_base: float = 10000.0
    """Base wavelength of rotary positions."""

    rope_fraction: float = 1.0
    """Share of each head's channels that turn, from the first on, in (0, 1]."""

    tie_embeddings: bool = False
    """Use the embedding table as the output head."""

    bias: bool = False
    """Biases in all linear maps and layer norms."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Parts of attention."""

    init: InitConfig = field(default_factory=InitConfig)
    """Distribution of the weights at birth."""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.head_dim if self.head_dim is not None else self.d_model // self.n_heads

    @property
    def d_rope(self) -> int:
        """Channels of a head that turn."""
        return int(self.d_head * self.rope_fraction)

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with a linear branch."""
        return self.mlp in GATED

    @property
    def ff(self) -> int:
        """Hidden width of the MLP, resolved."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-(8 * self.d_model // 3) // 32) * 32 if self.gated else 4 * self.d_model

    def problems(self) -> list[str]:
        """Everything that makes this config impossible, one line each, with the mend; empty if it is sound."""
        found = [
            f"model.{name} is {value}: give at least 1"
            for name, value in (
                ("d_model", self.d_model),
                ("n_layers", self.n_layers),
                ("n_heads", self.n_heads),
                ("n_kv_heads", self.kv_heads),
                ("head_dim", 1 if self.head_dim is None else self.head_dim),
                ("d_ff", self.ff),
                ("max_seq_len", self.max_seq_len),
            )
            if value < 1
        ]
        if self.vocab_size < 2:
            found.append(f"model.vocab_size is {self.vocab_size}: give at least 2")
        if not found:
            if self.head_dim is None and self.d_model % self.n_heads:
                found.append(
                    f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}: "
                    f"give a multiple of {self.n_heads}, or model.head_dim"
                )
            elif not 0 < self.rope_fraction <= 1:
                found.append(f"model.rope_fraction is {self.rope_fraction}: give a number above 0 and at most 1")
            elif self.positions == "rope" and (self.d_rope < 2 or self.d_rope % 2):
                found.append(
                    f"model.rope_fraction of model.d_model/model.n_heads is {self.d_rope}: rotary positions need an "
                    "even number of channels, change one of these or model.positions"
                )
            if self.positions == "sinusoidal" and self.d_model % 2:
                found.append(f"model.d_model {self.d_model} is odd: model.positions sinusoidal needs pairs of channels")
            if self.n_heads % self.kv_heads:
                found.append(
                    f"model.n_heads {self.n_heads} is not divisible by model.n_kv_heads {self.kv_heads}: "
                    f"give a divisor of {self.n_heads}"
                )
        if not 0 < self.norm_eps < float("inf"):
            found.append(f"model.norm_eps is {self.norm_eps}: give a positive number")
        if not 0 < self.rope_base < float("inf"):
            found.append(f"model.rope_base is {self.rope_base}: give a positive number")
        if not 0 < self.init.std < float("inf"):
            found.append(f"model.init.std is {self.init.std}: give a positive number")
        t_ref = self.attention.calibration.t_ref
        if t_ref is not None and t_ref < 1:
            found.append(f"model.attention.calibration.t_ref is {t_ref}: give at least 1")
        outside = [b for b in self.attention.aggregation_blocks or [] if not 0 <= b < self.n_layers]
        if outside:
            found.append(f"model.attention.aggregation_blocks has {outside}: blocks go from 0 to {self.n_layers - 1}")
        return found + self._unread()

    def _unread(self) -> list[str]:
        """Fields that were set although nothing reads them under the others: a key is never ignored."""
        attention, calibration = self.attention, self.attention.calibration
        aggregation = "model.attention.aggregation"
        settings = (
            (
                "attention.aggregation_blocks",
                attention.aggregation_blocks is not None,
                attention.aggregation != "plain",
                f"{aggregation} headnorm or calibrated",
            ),
            (
                "attention.calibration",
                calibration != CalibrationConfig(),
                attention.aggregation == "calibrated",
                f"{aggregation} calibrated",
            ),
            (
                "attention.calibration.t_ref",
                calibration.t_ref is not None,
                calibration.direction == "attenuate",
                "model.attention.calibration.direction attenuate",
            ),
            (
                "attention.calibration.gradient",
                not calibration.gradient,
                calibration.n_eff == "exact",
                "model.attention.calibration.n_eff exact",
            ),
            (
                "init.std",
                self.init.std != InitConfig.std,
                self.init.kind in ("normal", "gpt2"),
                "model.init.kind normal or gpt2",
            ),
            ("rope_base", self.rope_base != ModelConfig.rope_base, self.positions == "rope", "model.positions rope"),
            ("rope_fraction", self.rope_fraction != 1, self.positions == "rope", "model.positions rope"),
            ("norm_placement", self.norm_placement != "pre", self.norm != "none", "model.norm rmsnorm or layernorm"),
        )
        return [
            f"model.{name} is set, but only {reader} reads it: leave it out or change that"
            for name, is_set, is_read, reader in settings
            if is_set and not is_read
        ]
