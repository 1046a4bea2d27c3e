"""The model, as a config: every architecture is a value of these dataclasses and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..errors import UsageError
from ..schema import outside
from .attention.config import MAX_FACTOR, AttentionConfig, CalibrationConfig, LatentConfig, Setting
from .experts.config import ExpertsConfig

# ---------------------------------------------------------------- fields of nested configs by their dotted names


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a tree of fields, in its order: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``; a list is one leaf, and so is an
    empty mapping.

    Args:
        tree: mapping from ``dataclasses.asdict`` or a YAML file.
        prefix: prefix of every name.

    Raises:
        UsageError: a name is both nested and dotted in ``tree``, so that one value would replace the other.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        is_group = isinstance(value, Mapping) and bool(value)
        leaves = dotted(value, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": value}
        if twice := [leaf for leaf in leaves if leaf in found]:
            raise UsageError(f"{twice[0]} stands twice, nested and with dots: leave one out")
        found |= leaves
    return found


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tree whose leaves have these dotted names, the inverse of `dotted`: ``{"a.b": 1}`` is ``{"a": {"b":
    1}}``.
    """
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        *groups, last = name.split(".")
        branch = tree
        for group in groups:
            below = branch.get(group)
            branch[group] = branch = below if isinstance(below, dict) else {}
        branch[last] = value
    return tree


# ---------------------------------------------------------------- dropout


@dataclass(frozen=True)
class DropoutConfig:
    """Dropout in training passes (arXiv 1207.0580), as in GPT-2; off during measurements."""

    embedding: float = 0.0
    """Share of the channels of what enters the first block, token and position embeddings together, that become 0 in a
    training pass; the others are divided by 1 minus it; 0.1 in GPT-2 (Radford et al. 2019)."""

    residual: float = 0.0
    """The same of what attention and MLP give, before it is added to the residual stream; 0.1 in GPT-2 (Radford et al.
    2019)."""

    attention: float = 0.0
    """The same of the weights of attention; without a fused kernel, since none gives the same masks everywhere; 0.1 in
    GPT-2 (Radford et al. 2019)."""

    @property
    def is_on(self) -> bool:
        """True if anything is dropped."""
        return any(getattr(self, field.name) for field in fields(self))

    def problems(self) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        return outside("model.dropout", self, {field.name: (0, 0.99) for field in fields(self)})


# ---------------------------------------------------------------- the model

#: Channels of a head that the kernel of ``calibration.squares: joint`` takes at most: tiles of wider ones do not fit
#: beside each other.
_WIDEST_JOINT = 128

__all__ = [
    "AttentionConfig",
    "CalibrationConfig",
    "DropoutConfig",
    "ExpertsConfig",
    "InitConfig",
    "LatentConfig",
    "ModelConfig",
]

#: Gated MLPs, and the activation of their gate.
GATED = {
    "reglu": "relu",
    "geglu": "gelu",
    "swiglu": "silu",
    "tanhglu": "tanh",
    "bilinear": "identity",
    "relu2glu": "relu2",
}

#: Draws of a standard deviation above this may leave float32.
MAX_STD = 1e30


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
    """Standard deviation of ``normal``, ``truncated_normal`` (before truncation) and ``gpt2``."""

    truncate: float = 2.0
    """Bound of ``truncated_normal``, in standard deviations."""

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

    def problems(self) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        found = []
        if not 0 < self.std <= MAX_STD:
            found.append(f"model.init.std is {self.std}: give a number above 0, at most {MAX_STD:g}")
        if not 0.1 <= self.truncate <= 100:
            found.append(f"model.init.truncate is {self.truncate}: give 0.1 to 100")
        if twice := sorted({part for part in self.zero if self.zero.count(part) > 1}):
            found.append(f"model.init.zero names {', '.join(twice)} twice: name each part once")
        return found

    def conditional_settings(self) -> list[Setting]:
        """List fields that depend on other fields."""
        return [
            Setting(
                "init.std",
                self.std != type(self).std,
                self.kind in ("normal", "truncated_normal", "gpt2"),
                "model.init.kind normal, truncated_normal or gpt2",
            ),
            Setting(
                "init.truncate",
                self.truncate != type(self).truncate,
                self.kind == "truncated_normal",
                "model.init.kind truncated_normal",
            ),
        ]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

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

    norm: Literal["rmsnorm", "layernorm", "dyt", "none"] = "rmsnorm"
    """Normalisation around attention and the MLP (see norm_placement) and before the output head: ``rmsnorm``
    (arXiv 1910.07467); ``layernorm`` (arXiv 1607.06450); ``dyt``, a tanh of each channel in their place, γ·tanh(αx)
    (arXiv 2503.10622); or none."""

    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Tensors that are normalised: ``pre``, the input of attention and of the MLP (arXiv 2002.04745), as in GPT-2 and
    LLaMA; ``post``, their output before it is added to the residual stream (OLMo-2, arXiv 2501.00656); or ``both``
    (Gemma 2, arXiv 2408.00118).
    """

    parallel_residual: bool = False
    """Attention and MLP read the same residual stream, and their outputs are added together (GPT-NeoX,
    arXiv 2204.06745)."""

    norm_gate: int | None = None
    """Rank of a gate behind every norm of the residual stream: what the norm gives, y, times σ(W_up · silu(W_down · y))
    (GatedNorm, arXiv 2601.22966); by default none."""

    norm_scale: bool = False
    """Let every RMSNorm of the residual stream norm λ·x in place of x, λ a learned number of each channel that starts
    at 1 (PreAffine, arXiv 2601.22966): a channel can set the size of the others without being large itself."""

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

    logit_softcap: float | None = None
    """Logits become cap · tanh(logits / cap), in training as in measurement (Gemma 2, arXiv 2408.00118); by default
    they stay as they are."""

    bias: bool = False
    """Biases in all linear maps and layer norms."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Parts of attention."""

    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """A mixture of experts in place of the MLP."""

    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """Dropout in training passes."""

    init: InitConfig = field(default_factory=InitConfig)
    """Distribution of the weights at birth."""

    def __post_init__(self) -> None:
        if found := self.problems():
            raise UsageError("; ".join(found))

    @property
    def position_limit(self) -> int | None:
        """Largest number of tokens that the model can read: the length of a learned table; None without a limit."""
        return self.max_seq_len if self.positions == "learned" else None

    @property
    def kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def d_head(self) -> int:
        """Width of one head; for latent attention the default of its widths."""
        return self.head_dim if self.head_dim is not None else self.d_model // self.n_heads

    @property
    def d_rope(self) -> int:
        """Channels of a head that rotate."""
        latent = self.attention.latent
        if latent.is_on:
            return self.d_head // 2 if latent.rope_width is None else latent.rope_width
        return int(self.d_head * self.rope_fraction)

    @property
    def d_key(self) -> int:
        """Width of a head's queries and keys."""
        return self.d_rope + self._d_nope if self.attention.latent.is_on else self.d_head

    @property
    def d_value(self) -> int:
        """Width of a head's values and output."""
        width = self.attention.latent.value_width
        return self._d_nope if width is None else width

    @property
    def _d_nope(self) -> int:
        """Channels of a head of latent attention that do not rotate."""
        width = self.attention.latent.nope_width
        return self.d_head if width is None else width

    @property
    def qkv_bias(self) -> bool:
        """True if the maps of queries, keys and values have biases."""
        return self.bias if self.attention.qkv_bias is None else self.attention.qkv_bias

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the two tensors that a token leaves in a cache: keys and values; for latent attention the
        narrow vector behind both, and the key that all heads share.
        """
        if self.attention.latent.kv_rank is not None:
            return (1, self.attention.latent.kv_rank), (1, self.d_rope)
        return (self.kv_heads, self.d_key), (self.kv_heads, self.d_value)

    @property
    def gated(self) -> bool:
        """True if the MLP multiplies an activated gate with a linear branch."""
        return self.mlp in GATED

    @property
    def gate_sizes(self) -> tuple[int, int]:
        """Heads of the tensor that a gate multiplies, and channels for each; behind the output projection, one head of
        all channels.
        """
        attention = self.attention
        if attention.gate_at == "projection":
            return 1, self.d_model
        n_heads = self.kv_heads if attention.gate_at in ("key", "value") else self.n_heads
        width = self.d_key if attention.gate_at in ("key", "query") else self.d_value
        return n_heads, width if attention.gate == "channel" else 1

    @property
    def ff(self) -> int:
        """Hidden width of the MLP, resolved."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-(8 * self.d_model // 3) // 32) * 32 if self.gated else 4 * self.d_model

    def problems(self) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy; empty if it is sound."""
        found = self._size_problems() or self._fit_problems()
        if not 0 < self.norm_eps < float("inf"):
            found.append(f"model.norm_eps is {self.norm_eps}: give a positive number")
        if not 0 < self.rope_base < float("inf"):
            found.append(f"model.rope_base is {self.rope_base}: give a positive number")
        if self.logit_softcap is not None and not 0 < self.logit_softcap <= MAX_FACTOR:
            found.append(
                f"model.logit_softcap is {self.logit_softcap}: give a number above 0 to {MAX_FACTOR:g}, or nothing"
            )
        found += self.init.problems() + self.attention.problems(self.n_layers, self.max_seq_len)
        found += self.experts.problems(self.n_layers) + self.dropout.problems()
        if self.dropout.attention and (own := self.attention.user_parts.get("normaliser")):
            found.append(
                f"model.dropout.attention with model.attention.normaliser {own}: whether a class of your own drops "
                "weights is not known, leave it out"
            )
        return found + [problem for setting in self.conditional_settings() if (problem := setting.problem)]

    def _size_problems(self) -> list[str]:
        """List sizes that no model can have."""
        bounds = {
            "d_model": (1, 1 << 20),
            "n_layers": (1, 2048),
            "n_heads": (1, 1 << 16),
            "n_kv_heads": (1, 1 << 16),
            "head_dim": (1, 1 << 16),
            "d_ff": (1, 1 << 24),
            "max_seq_len": (1, 1 << 27),
            "vocab_size": (2, 1 << 26),
            "t5_max_distance": (1, 1 << 27),
            "t5_buckets": (2, 1 << 16),
            "norm_gate": (1, 1 << 16),
        }
        return outside("model", self, bounds)

    def _fit_problems(self) -> list[str]:
        """List sizes, each possible, that do not fit together."""
        found = []
        if self.head_dim is None and self.d_model % self.n_heads:
            found.append(
                f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}: "
                f"give a multiple of {self.n_heads}, or model.head_dim"
            )
        elif not 0 < self.rope_fraction <= 1:
            found.append(f"model.rope_fraction is {self.rope_fraction}: give a number above 0 and at most 1")
        elif self.positions == "rope" and not self.attention.latent.is_on and (self.d_rope < 2 or self.d_rope % 2):
            found.append(
                f"model.rope_fraction of model.d_model/model.n_heads is {self.d_rope}: rotary positions need an "
                "even number of channels, change one of these or model.positions"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            found.append(f"model.d_model {self.d_model} is odd: model.positions sinusoidal needs pairs of channels")
        if self.attention.latent.is_on:
            found += self._latent_problems()
        if self.positions == "t5" and not 2 <= self.t5_buckets < 2 * self.t5_max_distance:
            found.append(
                f"model.t5_buckets is {self.t5_buckets}: give at least 2, and fewer than twice "
                f"model.t5_max_distance {self.t5_max_distance}"
            )
        if self.attention.rows.pairs_heads and (self.n_heads % 2 or self.kv_heads != self.n_heads):
            normaliser = self.attention.normaliser
            found.append(
                f"model.attention.normaliser {normaliser} pairs heads, and model.n_heads is {self.n_heads} with "
                f"{self.kv_heads} of keys and values: give an even number, and no model.n_kv_heads"
            )
        if self.n_heads % self.kv_heads:
            found.append(
                f"model.n_heads {self.n_heads} is not divisible by model.n_kv_heads {self.kv_heads}: "
                f"give a divisor of {self.n_heads}"
            )
        if self.attention.calibration.squares == "joint" and self._no_joint_squares:
            found.append(f"model.attention.calibration.squares joint {self._no_joint_squares}")
        return found

    @property
    def _no_joint_squares(self) -> str:
        """Reason why the kernel that sums squares with the output does not take this attention, and the remedy."""
        attention = self.attention
        if attention.aggregation == "calibrated" and (not attention.rows.is_softmax or attention.prefix is not None):
            part = "prefix" if attention.rows.is_softmax else f"normaliser {attention.normaliser}"
            return f"with model.attention.{part}: its kernel runs causal softmaxes, give separate"
        if self.positions == "t5" or self.dropout.attention:
            part = "positions t5" if self.positions == "t5" else f"dropout.attention {self.dropout.attention}"
            return f"with model.{part}, whose weights are explicit: give separate"
        # A bias by distance is eight more channels (attention/scores.py).
        width = max(self.d_key, self.d_value) + 8 * (self.positions == "alibi")
        if width > _WIDEST_JOINT:
            return f"takes heads of {_WIDEST_JOINT} channels at most, and these have {width}: give separate"
        return ""

    @property
    def squares(self) -> Literal["auto", "joint", "separate"]:
        """``calibration.squares``, ``auto`` only where the joint kernel takes this attention."""
        asked = self.attention.calibration.squares
        return "separate" if asked == "auto" and self._no_joint_squares else asked

    def _latent_problems(self) -> list[str]:
        """List widths of latent attention that do not fit together."""
        found = []
        if self.d_rope < 2 or self.d_rope % 2:
            found.append(
                f"model.attention.latent.rope_width is {self.d_rope}: rotary positions need an even number of channels"
            )
        if self.d_value > self.d_key:
            found.append(
                f"model.attention.latent.value_width is {self.d_value}, and keys have {self.d_key} channels: give at "
                "most as many"
            )
        if self.kv_heads != self.n_heads:
            found.append(
                f"model.n_kv_heads {self.n_kv_heads} with model.attention.latent: every head has keys and values of "
                "its own, leave it out"
            )
        return found

    def conditional_settings(self) -> list[Setting]:
        """List all fields of the tree that depend on other fields."""
        plain = (not self.attention.latent.is_on, "model.attention.latent.kv_rank null")
        t5 = (self.positions == "t5", "model.positions t5")
        rope = (self.positions == "rope", "model.positions rope")
        norms = "model.norm rmsnorm, layernorm or dyt"
        parts = {
            "positions.table": (self.positions in ("learned", "t5"), "model.positions learned or t5"),
            "attn.q": (self.attention.latent.q_rank is None, "model.attention.latent.q_rank null"),
            "attn.k": plain,
            "attn.v": plain,
            "attn.gate.map": (self.attention.gate != "none", "model.attention.gate head or channel"),
            "mlp.gate": (self.gated, "a gated model.mlp"),
            "head": (not self.tie_embeddings, "model.tie_embeddings false"),
        }
        return [
            *self.attention.conditional_settings(),
            *self.experts.conditional_settings(),
            Setting(
                "attention.nope_blocks",
                self.attention.nope_blocks is not None,
                self.positions in ("rope", "alibi", "t5"),
                "model.positions rope, alibi or t5",
            ),
            Setting("attention.latent.kv_rank", self.attention.latent.is_on, *rope),
            Setting("t5_buckets", self.t5_buckets != type(self).t5_buckets, *t5),
            Setting("t5_max_distance", self.t5_max_distance != type(self).t5_max_distance, *t5),
            *self.init.conditional_settings(),
            *(Setting(f"init.zero {part}", part in self.init.zero, *exists) for part, exists in parts.items()),
            Setting("rope_base", self.rope_base != type(self).rope_base, *rope),
            Setting("rope_fraction", self.rope_fraction != 1, *rope),
            Setting("rope_fraction", self.rope_fraction != 1, *plain),
            Setting("norm_gate", self.norm_gate is not None, self.norm != "none", norms),
            Setting("norm_scale", self.norm_scale, self.norm == "rmsnorm", "model.norm rmsnorm"),
            Setting(
                "norm_placement",
                self.norm_placement != "pre",
                self.norm != "none",
                norms,
            ),
        ]
