"""The model, as a config: every architecture is a value of these dataclasses and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..errors import UsageError
from .config_checks import problems

#: Gated MLPs, and the activation of their gate.
GATED = {
    "reglu": "relu",
    "geglu": "gelu",
    "swiglu": "silu",
    "tanhglu": "tanh",
    "bilinear": "identity",
    "relu2glu": "relu2",
}

#: Normalisers that weigh each score on its own.
SIMILARITIES = ("sigmoid", "relu", "elu", "identity")


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
    """Let gradients flow through the factor; else it is a constant to the backward pass."""

    correlation: Literal["none", "estimated", "learned"] = "none"
    """Correlated form (definitions §9, in none of the sources): the factor becomes 1/√(ρ + (1−ρ)/n_eff), ρ the
    correlation of a head's values across positions. ``none`` takes ρ = 0, ``estimated`` running moments of the values
    (frozen in evaluation), ``learned`` the sigmoid of one scalar per head. ``attenuate`` divides by the factor's own
    value at n_eff = t_ref."""

    rho: float = 0.5
    """Where a learned ρ starts, between 0 and 1."""


@dataclass(frozen=True)
class AttentionConfig:
    """Parts of attention."""

    aggregation: Literal["plain", "headnorm", "calibrated"] = "plain"
    """What happens to each head's Σ a·v before the output projection: nothing (``plain``); ``headnorm``, head-wise
    RMSNorm [SO]; or ``calibrated``, variance calibration [BB]."""

    aggregation_blocks: list[int] | None = None
    """Blocks (from 0) that ``aggregation`` applies to, the others staying plain; by default all."""

    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Variance calibration's own settings."""

    normaliser: Literal["softmax", "softmax_off_by_one", "softmax_sink", "sigmoid", "relu", "elu", "identity"] = (
        "softmax"
    )
    """How scores become weights. ``softmax`` (arXiv 1706.03762); ``softmax_off_by_one``, exp(s)/(1 + Σ exp(s)) (Miller
    2023, Attention Is Off By One); ``softmax_sink``, the same with a learned logit per head in place of 0, exp(b) for 1
    (gpt-oss, arXiv 2508.10925); or a similarity of its own for each score: its ``sigmoid`` (arXiv 2409.04431), its
    ``relu``, its ``elu`` + 1, or the score itself, ``identity`` [AS]."""

    normalise_rows: bool = False
    """Divide the similarities ``sigmoid``, ``relu`` and ``elu`` by their sum over the row; ``identity``, whose sum has
    either sign, by the larger of its size and 1 [AS]."""

    sigmoid_bias: Literal["none", "log_length"] = "none"
    """Add −log max_seq_len to the scores of ``sigmoid``, so that a newborn row sums to about 1 (arXiv 2409.04431)."""

    window: int | None = None
    """Sliding window (Longformer, arXiv 2004.05150; Mistral, arXiv 2310.06825): a query sees itself and the
    window − 1 positions before it; by default all before it."""

    prefix: int | None = None
    """Prefix language modelling (arXiv 1910.10683): the first ``prefix`` positions see one another; losses count from
    the last of them on."""

    kv_bias: Literal["none", "key", "value", "key_value"] = "none"
    """Learned biases [AS]: ``key``, one more key that every query sees, with value 0; ``key_value``, with a learned
    value; ``value``, a learned vector added to every head output. The key has no position."""

    kv_bias_shared: bool = False
    """One bias for all heads of a block in place of one for each key/value head."""

    gate: Literal["none", "head", "channel"] = "none"
    """Multiply head outputs, after ``aggregation``, with a sigmoid of a linear map of the block's input
    (arXiv 2505.06708): one number per ``head``, or one per ``channel``."""

    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before they turn: ``head``, over each head's channels with one gain shared by the
    heads (Qwen3, arXiv 2505.09388); ``width``, over all heads' channels together (OLMo-2, arXiv 2501.00656)."""

    qkv_bias: bool | None = None
    """Biases of the query, key and value maps, Qwen2's only ones (arXiv 2407.10671); by default model.bias."""

    @property
    def weighs_scores_alone(self) -> bool:
        """Whether the normaliser weighs each score on its own, in place of a softmax over the row."""
        return self.normaliser in SIMILARITIES

    @property
    def rows_sum_to_one(self) -> bool:
        """Whether each query's weights on tokens sum to 1 by construction."""
        own = self.normaliser == "softmax" or (self.normalise_rows and self.normaliser != "identity")
        return own and self.kv_bias not in ("key", "key_value")


@dataclass(frozen=True)
class InitConfig:
    """The distribution at birth of every weight matrix and embedding (gains start at 1, biases at 0)."""

    kind: Literal["fan_in", "normal", "truncated_normal", "gpt2", "xavier", "kaiming", "orthogonal"] = "fan_in"
    """Normal distributions with mean 0, and as standard deviation: ``fan_in``, 1/√fan-in (1/√d_model for embeddings);
    ``normal``, std; ``truncated_normal``, std, what lies further than ``truncate``·std from 0 drawn anew; ``gpt2``, std
    and, for the two maps of each block that write to the residual stream, std/√(2·n_layers) (Radford et al. 2019);
    ``xavier``, √(2/(fan-in + fan-out)) (Glorot & Bengio 2010); ``kaiming``, √(2/fan-in) (arXiv 1502.01852).
    ``orthogonal`` takes matrices with orthonormal rows or columns for all linear maps (arXiv 1312.6120); embedding
    tables and the output head, which are tables of vectors, stay normal with 1/√width."""

    std: float = 0.02
    """Standard deviation of ``normal``, ``truncated_normal`` (before the cut) and ``gpt2``."""

    truncate: float = 2.0
    """Where ``truncated_normal`` is cut, in standard deviations."""

    zero: list[
        Literal[
            "embed",
            "positions.table",
            "attn.q",
            "attn.k",
            "attn.v",
            "attn.o",
            "attn.gate.map",
            "mlp.gate",
            "mlp.up",
            "mlp.down",
            "head",
        ]
    ] = field(default_factory=list)
    """Parts whose matrix starts at 0 in every block, whatever the kind; a part is a module's name, block left out."""


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
    """Key/value heads per block, fewer than n_heads in grouped-query attention (arXiv 2305.13245), 1 in multi-query
    attention (arXiv 1911.02150); by default n_heads."""

    head_dim: int | None = None
    """Width of one head; by default d_model/n_heads."""

    d_ff: int | None = None
    """Hidden width of the MLP; by default 4·d_model, and 8/3·d_model rounded up to a multiple of 32 for gated MLPs."""

    vocab_size: int = 4096
    """Rows of the embedding table and of the output head."""

    max_seq_len: int = 256
    """Training length in tokens, and the most positions a learned table holds."""

    norm: Literal["rmsnorm", "layernorm", "none"] = "rmsnorm"
    """Normalisation around attention and the MLP (see norm_placement) and before the output head: ``rmsnorm``
    (arXiv 1910.07467); ``layernorm`` (arXiv 1607.06450); or none."""

    norm_placement: Literal["pre", "post", "both"] = "pre"
    """What is normalised: ``pre``, the input of attention and of the MLP (arXiv 2002.04745), as in GPT-2 and LLaMA;
    ``post``, their output before it is added to the residual stream (OLMo-2, arXiv 2501.00656); or ``both`` (Gemma 2,
    arXiv 2408.00118)."""

    parallel_residual: bool = False
    """Attention and MLP read the same residual stream, and their outputs are added together (GPT-NeoX,
    arXiv 2204.06745)."""

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
    """Activation of the MLP: ``relu``; ``gelu`` (arXiv 1606.08415); ``silu`` (arXiv 1702.03118); ``tanh``;
    ``identity``; ``relu2``, squared ReLU (Primer, arXiv 2109.08668); ``gelu_tanh``, GPT-2's approximation of GELU
    (arXiv 1606.08415). The last six are the gated forms of the first six, in that order; ``reglu``, ``geglu``,
    ``swiglu`` and ``bilinear`` are known as variants of GLU (arXiv 2002.05202)."""

    positions: Literal["rope", "learned", "sinusoidal", "alibi", "t5", "none"] = "rope"
    """Positional information: ``rope``, rotary (arXiv 2104.09864); a ``learned`` or a ``sinusoidal`` table added to the
    embeddings (arXiv 1706.03762); ``alibi``, a penalty on scores that grows linearly with distance, its slope fixed for
    each head (arXiv 2108.12409); ``t5``, a learned number per head and bucket of distances, shared by all blocks, added
    to scores (arXiv 1910.10683); or none."""

    rope_base: float = 10000.0
    """Base wavelength of rotary positions (arXiv 2104.09864)."""

    rope_fraction: float = 1.0
    """Share of each head's channels that turn, from the first on, in (0, 1] (GPT-NeoX, arXiv 2204.06745)."""

    t5_buckets: int = 32
    """Buckets of distances of ``t5``: the first half one distance each, the others growing ones (arXiv 1910.10683)."""

    t5_max_distance: int = 128
    """Distance from which on all share the last bucket of ``t5`` (arXiv 1910.10683)."""

    tie_embeddings: bool = False
    """Use the embedding table as the output head (arXiv 1608.05859)."""

    bias: bool = False
    """Biases in all linear maps and layer norms."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Parts of attention."""

    init: InitConfig = field(default_factory=InitConfig)
    """Distribution of the weights at birth."""

    def __post_init__(self) -> None:
        if found := self.problems():
            raise UsageError("; ".join(found))

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
        return problems(self)
