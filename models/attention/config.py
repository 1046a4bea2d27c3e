"""Config of attention: its parts, their settings, and their contradictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from ...schema import outside, quoted
from ..user_classes import is_user_class

#: Largest factor of numbers in float32 that leaves room for sums of products.
MAX_FACTOR = 1e30

# ---------------------------------------------------------------- latent attention

#: Fields that are read where ``kv_rank`` is set.
LATENT_WIDTHS = ("q_rank", "rope_width", "nope_width", "value_width")


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads come from one narrow vector of each
    token (definitions §9). It is on where kv_rank is set."""

    kv_rank: int | None = None
    """Width of the vector of a token that the keys and values of all heads are mapped from, behind an RMSNorm
    (DeepSeek-V2, arXiv 2405.04434); by default each head has maps of its own."""

    q_rank: int | None = None
    """Width of the vector that queries are mapped from in the same way (DeepSeek-V2, arXiv 2405.04434); by default they
    are mapped from the input, as in DeepSeek-V2-Lite."""

    rope_width: int | None = None
    """Channels that rotate, in each query and in the one key of a token that all heads share (DeepSeek-V2, arXiv
    2405.04434); by default half the width of a head.
    """

    nope_width: int | None = None
    """Channels of queries and keys beside these, which know no positions (DeepSeek-V2, arXiv 2405.04434); by default
    the width of a head."""

    value_width: int | None = None
    """Channels of a head's values (DeepSeek-V2, arXiv 2405.04434), at most those of its keys; by default nope_width."""

    @property
    def is_on(self) -> bool:
        """True if attention is latent."""
        return self.kv_rank is not None

    def problems(self) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        bounds = dict.fromkeys(("kv_rank", *LATENT_WIDTHS), (1, 1 << 16))
        return outside("model.attention.latent", self, bounds)

    def excludes(self, *, qk_norm: str, v_norm: str, gate_at: str, gate_input: str) -> list[str]:
        """List the given parts of attention that contradict it, one line each, with the remedy."""
        if not self.is_on:
            return []
        found = [
            f"model.attention.{name} {value} with model.attention.latent, which has norms of its own: leave it out"
            for name, value in (("qk_norm", qk_norm), ("v_norm", v_norm))
            if value != "none"
        ]
        kept = "with model.attention.latent: a token leaves its narrow vector alone to later ones"
        if gate_at in ("key", "value"):
            found.append(f"model.attention.gate_at {gate_at} {kept}, give output, query or projection")
        if gate_input == "value":
            found.append(f"model.attention.gate_input value {kept}, give input")
        return found


# ---------------------------------------------------------------- attention

AggregationName = Literal["plain", "headnorm", "headnorm_released", "differential_norm", "calibrated"]
NormaliserName = Literal[
    "softmax", "softmax_off_by_one", "softmax_sink", "softmax_clipped", "softpick", "differential",
    "sigmoid", "relu", "elu", "identity",
]  # fmt: skip
GateName = Literal["none", "head", "channel"]
RowSum = Literal["one", "at most one", "any"]


class Rows(NamedTuple):
    """Facts about a normaliser's rows of weights. By default those with which least is allowed."""

    row_sum: RowSum
    """Sum of the absolute weights of one query; ``any`` if it may exceed 1."""
    fused: bool = False
    """True if the fused kernels make the output, without a matrix of weights."""
    takes_keys: bool = False
    """True if learned keys, and those of an adapter's prefix, may come beside the tokens'."""
    is_softmax: bool = False
    """True if weights are shares of one sum of exponentials, in which one key can replace several."""
    adds_key: bool = False
    """True if the normaliser itself adds a key, such as a sink's logit, to the softmax of a fused kernel."""
    pairs_heads: bool = False
    """True if two neighbouring heads make one row."""
    normalised_sum: RowSum | None = None
    """The sum with ``normalise_rows``, for similarities, which weigh each score on its own; None for the others."""


#: Facts about the normalisers, by name.
ROWS: dict[str, Rows] = {
    "softmax": Rows("one", fused=True, takes_keys=True, is_softmax=True),
    "softmax_off_by_one": Rows("at most one", fused=True, takes_keys=True, is_softmax=True, adds_key=True),
    "softmax_sink": Rows("at most one", fused=True, takes_keys=True, is_softmax=True, adds_key=True),
    "softmax_clipped": Rows("at most one", takes_keys=True),  # any if clip_zeta exceeds 1: see row_sum
    "softpick": Rows("at most one", takes_keys=True),
    "differential": Rows("any", fused=True, pairs_heads=True),
    "sigmoid": Rows("any", takes_keys=True, normalised_sum="one"),
    "relu": Rows("any", takes_keys=True, normalised_sum="one"),
    "elu": Rows("any", takes_keys=True, normalised_sum="one"),
    "identity": Rows("any", takes_keys=True, normalised_sum="any"),
}
#: The same about a class of the user's own: its row sums are unknown, and it weighs learned keys.
_ROWS_OF_USER = Rows("any", fused=True, takes_keys=True)
#: Normalisers that weigh each score on its own.
SIMILARITIES = tuple(name for name, rows in ROWS.items() if rows.normalised_sum is not None)

#: Parts that may be a class of the user's own, ``module:Class``, with the names of those that are here.
OPEN_PARTS: dict[str, tuple[str, ...]] = {
    "aggregation": get_args(AggregationName),
    "normaliser": tuple(ROWS),
    "gate": get_args(GateName),
}


class Setting(NamedTuple):
    """A field that only some configs read."""

    name: str
    """Dotted, below ``model``."""
    is_set: bool
    is_read: bool
    reader: str
    """The fields and values under which it is read, in words."""

    @property
    def problem(self) -> str | None:
        """Reason to refuse the field: a field that nothing reads is never ignored. None if it is valid."""
        if self.is_read or not self.is_set:
            return None
        return f"model.{self.name} is set, but only {self.reader} reads it: leave it out or change that"


@dataclass(frozen=True)
class CalibrationConfig:
    """Variance-calibrated attention [BB] (definitions §9); read if attention.aggregation is ``calibrated``."""

    n_eff: Literal["analytic", "exact"] = "exact"
    """Effective number of tokens: ``analytic`` takes t+1 (uniform attention), ``exact`` 1/Σ a² of the weights, those on
    keys without a value (a sink's logit) among them."""

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
    """Start value of a learned ρ, between 0 and 1."""

    squares: Literal["auto", "joint", "separate"] = "auto"
    """Origin of exact Σ a² on a GPU: ``joint``, the same walk over the keys as the output, by a kernel in Triton;
    ``separate``, another attention's log-sum-exp; ``auto``, joint in 16 bits where its kernel takes the attention
    (docs/gpu.md). On a CPU in bf16 it is always the same walk."""

    def problems(self) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        found = []
        found += outside("model.attention.calibration", self, {"t_ref": (1, 1 << 27)})
        if not 0 < self.rho < 1:
            found.append(f"model.attention.calibration.rho is {self.rho}: give a number between 0 and 1")
        return found

    def conditional_settings(self) -> list[Setting]:
        """List fields that depend on other fields."""
        prefix = "attention.calibration"
        return [
            Setting(
                f"{prefix}.t_ref",
                self.t_ref is not None,
                self.direction == "attenuate",
                f"model.{prefix}.direction attenuate",
            ),
            Setting(f"{prefix}.gradient", not self.gradient, self.n_eff == "exact", f"model.{prefix}.n_eff exact"),
            Setting(
                f"{prefix}.rho",
                self.rho != type(self).rho,
                self.correlation == "learned",
                f"model.{prefix}.correlation learned",
            ),
            Setting(f"{prefix}.squares", self.squares != "auto", self.n_eff == "exact", f"model.{prefix}.n_eff exact"),
        ]


@dataclass(frozen=True)
class AttentionConfig:
    """Parts of attention."""

    aggregation: AggregationName | str = "plain"
    """Step between each head's Σ a·v and the output projection: nothing (``plain``); ``headnorm``, head-wise RMSNorm
    [SO]; ``headnorm_released``, its form in the authors' code, with a gain for each head that starts at the spread of
    the first token's output and decays with the weights; ``differential_norm``, the norm of differential attention
    (arXiv 2410.05258); or ``calibrated``, variance calibration [BB]. Also a class of your own, as module:Class.
    """

    aggregation_blocks: list[int] | None = None
    """Blocks (from 0) that ``aggregation`` applies to, the others staying plain; by default all."""

    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Variance calibration's own settings."""

    normaliser: NormaliserName | str = "softmax"
    """Map from scores to weights. ``softmax`` (arXiv 1706.03762); ``softmax_off_by_one``, exp(s)/(1 + Σ exp(s)) (Miller
    2023, Attention Is Off By One); ``softmax_sink``, the same with a learned logit per head in place of 0, exp(b) for 1
    (gpt-oss, arXiv 2508.10925); ``softmax_clipped``, stretched beyond 0 and 1 and clipped to them (arXiv 2306.12929);
    ``softpick``, relu(exp(s) − 1) / Σ abs(exp(s) − 1) (arXiv 2504.20966); ``differential``, one softmax minus λ times
    another, of neighbouring heads (arXiv 2410.05258, as published with aggregation differential_norm); or a similarity
    of its own for each score: its ``sigmoid`` (arXiv 2409.04431), its ``relu``, its ``elu`` + 1, or the score itself,
    ``identity`` [AS]. Also a class of your own, as module:Class.
    """

    normalise_rows: bool = False
    """Divide the similarities ``sigmoid``, ``relu`` and ``elu`` by their sum over the row; ``identity``, whose sum has
    either sign, by the larger of its size and 1 [AS]."""

    sigmoid_bias: Literal["none", "log_length"] = "none"
    """Add −log max_seq_len to the scores of ``sigmoid``, so that a newborn row sums to about 1 (arXiv 2409.04431)."""

    clip_alpha: float = 12.0
    """Distance below 0 to which ``softmax_clipped`` stretches, times max_seq_len: γ = −clip_alpha/max_seq_len; 12 is
    that of OPT-125M (arXiv 2306.12929).
    """

    clip_zeta: float | None = None
    """ζ, how far above 0 ``softmax_clipped`` stretches, at least 1 (arXiv 2306.12929); by default 1."""

    window: int | list[int | None] | None = None
    """Sliding window (Longformer, arXiv 2004.05150; Mistral, arXiv 2310.06825): a query sees itself and the
    window − 1 positions before it; by default all before it. A list has one entry for each block, null where a query
    sees all (gpt-oss, arXiv 2508.10925: every other block)."""

    nope_blocks: list[int] | None = None
    """Blocks (from 0) whose attention is given no positions, ``model.positions`` applying to the others
    (arXiv 2501.18795; SmolLM3: every fourth block); by default none."""

    prefix: int | None = None
    """Prefix language modelling (arXiv 1910.10683): the first ``prefix`` positions see one another; losses count from
    the last of them on."""

    documents: bool = False
    """Separation of the documents of a text sequence: each attends to itself alone and restarts its positions, so that
    its result is that of the document by itself. The end-of-text token says where one ends; a sequence of ``backcopy``,
    or of a random probe, is one document.
    """

    kv_bias: Literal["none", "key", "value", "key_value"] = "none"
    """Learned biases [AS]: ``key``, one more key that every query sees, with value 0; ``key_value``, with a learned
    value; ``value``, a learned vector added to every head output. The key has no position."""

    kv_bias_shared: bool = False
    """Share one bias among all heads of a block, in place of one for each key/value head."""

    kv_bias_tokens: int | None = None
    """Learned keys of ``key`` and ``key_value``, each with a score of its own: sinks that are no tokens, in every
    block; by default one."""

    gate: GateName | str = "none"
    """Multiply head outputs, after ``aggregation``, with a sigmoid of a linear map of the block's input
    (arXiv 2505.06708): one number per ``head``, or one per ``channel``. Also a class of your own, as module:Class."""

    gate_at: Literal["output", "value", "key", "query", "projection"] = "output"
    """Tensor that the gate multiplies (arXiv 2505.06708): head outputs (``output``); each token's ``value``, ``key`` or
    ``query``, as they leave their maps and norms and before they turn; or the output of the output ``projection``.
    """

    gate_input: Literal["input", "value"] = "input"
    """Input of the gate's map: the block's ``input`` (arXiv 2505.06708); or the token's own ``value`` of all heads
    (value-state gated attention, arXiv 2510.09017: with gate head and gate_at value).
    """

    gate_activation: Literal["sigmoid", "silu"] = "sigmoid"
    """Activation of the output of the gate's map (arXiv 2505.06708)."""

    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before they turn: ``head``, over each head's channels with one gain shared by the
    heads (Qwen3, arXiv 2505.09388); ``width``, over all heads' channels together (OLMo-2, arXiv 2501.00656)."""

    v_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of values, as ``qk_norm`` norms queries and keys: ``head`` or ``width``."""

    qkv_bias: bool | None = None
    """Biases of the query, key and value maps, Qwen2's only ones (arXiv 2407.10671); by default model.bias."""

    latent: LatentConfig = field(default_factory=LatentConfig)
    """Latent attention's own settings."""

    @property
    def user_parts(self) -> dict[str, str]:
        """Parts that are a user's class, with its name; none of them has been imported."""
        return {part: name for part, names in OPEN_PARTS.items() if (name := getattr(self, part)) not in names}

    def window_of(self, block: int) -> int | None:
        """Return the window of a block (from 0)."""
        return self.window[block] if isinstance(self.window, list) else self.window

    def has_positions(self, block: int) -> bool:
        """Return True if positions reach the attention of a block (from 0)."""
        return block not in (self.nope_blocks or [])

    @property
    def first_prediction(self) -> int:
        """The first position that predicts its next token. The positions of a prefix see one another, so that all but
        the last of them would predict what they see; a loss leaves them out."""
        return (self.prefix or 1) - 1

    @property
    def rows(self) -> Rows:
        """Facts about the normaliser."""
        return ROWS.get(self.normaliser, _ROWS_OF_USER)

    @property
    def weighs_scores_alone(self) -> bool:
        """True if the normaliser weighs each score by itself, in place of a softmax over the row."""
        return self.rows.normalised_sum is not None

    @property
    def row_sum(self) -> RowSum:
        """Sum of each query's absolute weights, on tokens and on the keys beside them."""
        if self.normalise_rows and self.rows.normalised_sum is not None:
            return self.rows.normalised_sum
        return "any" if self._clips_above_one else self.rows.row_sum

    @property
    def rows_sum_to_one(self) -> bool:
        """True if each query's weights on tokens sum to 1 by construction; False for a user's class."""
        return self.row_sum == "one" and self.kv_bias not in ("key", "key_value")

    @property
    def _clips_above_one(self) -> bool:
        """True if ``softmax_clipped`` stretches above 1 before it clips."""
        return self.normaliser == "softmax_clipped" and (self.clip_zeta or 1.0) > 1

    def problems(self, n_layers: int, max_seq_len: int) -> list[str]:
        """List values out of range in a model of this size, and parts that contradict each other; one line each."""
        found = (
            self.calibration.problems()
            + self.latent.problems()
            + self.latent.excludes(
                qk_norm=self.qk_norm, v_norm=self.v_norm, gate_at=self.gate_at, gate_input=self.gate_input
            )
        )
        for part, name in self.user_parts.items():
            if not is_user_class(name):
                names = ", ".join(OPEN_PARTS[part])
                found.append(
                    f"model.attention.{part} is {quoted(name)}: give {names}, or a class of your own as module:Class"
                )
        found += self._window_problems(n_layers)
        if not 0 < self.clip_alpha <= MAX_FACTOR:
            found.append(
                f"model.attention.clip_alpha is {self.clip_alpha}: give a number above 0, at most {MAX_FACTOR:g}"
            )
        if self.clip_zeta is not None and not 1 <= self.clip_zeta <= 10:
            found.append(f"model.attention.clip_zeta is {self.clip_zeta}: give a number from 1 to 10")
        if self.gate_at == "projection" and self.gate == "head":
            found.append(
                "model.attention.gate head with model.attention.gate_at projection: what the output projection gives "
                "has no heads, give gate channel"
            )
        if self.prefix is not None and not 1 <= self.prefix <= max_seq_len:
            found.append(
                f"model.attention.prefix is {self.prefix}: give at least 1 and at most model.max_seq_len {max_seq_len}"
            )
        if self.documents and self.prefix is not None:
            found.append(
                "model.attention.documents with model.attention.prefix: each document would have a prefix whose losses "
                "do not count; give one of them"
            )
        if self.documents and is_user_class(self.normaliser):
            found.append(
                f"model.attention.documents needs a normaliser that keeps documents apart, which is not known of "
                f"model.attention.normaliser {self.normaliser}: leave documents out, or take one of "
                f"{', '.join(OPEN_PARTS['normaliser'])}"
            )
        if self.weighs_scores_alone and not self.normalise_rows and self.kv_bias == "key":
            found.append(
                f"model.attention.kv_bias key changes nothing under model.attention.normaliser {self.normaliser} "
                "without normalise_rows: a key of value 0 takes no weight from the others, give key_value"
            )
        if self.kv_bias_tokens is not None and not 1 <= self.kv_bias_tokens <= 1 << 10:
            found.append(f"model.attention.kv_bias_tokens is {self.kv_bias_tokens}: give 1 to 1024")
        if not self.rows.takes_keys and self.kv_bias in ("key", "key_value"):
            rows = "the difference of two softmaxes" if self.rows.pairs_heads else "its rows of weights"
            found.append(
                f"model.attention.kv_bias {self.kv_bias} with model.attention.normaliser {self.normaliser}: what a "
                f"learned key would be to {rows} is not defined, leave it out"
            )
        if self.aggregation == "calibrated":
            found += self._unbounded_rows()
            if self.calibration.correlation == "learned" and not self.calibration.gradient:
                found.append(
                    "model.attention.calibration.correlation learned is never learned with gradient false: "
                    "give correlation estimated, or gradient true"
                )
        for name in ("aggregation_blocks", "nope_blocks"):
            if outside := [block for block in getattr(self, name) or [] if not 0 <= block < n_layers]:
                found.append(f"model.attention.{name} has {outside}: blocks go from 0 to {n_layers - 1}")
        if self.nope_blocks and len({*self.nope_blocks}) == n_layers:
            found.append("model.attention.nope_blocks has all blocks: give model.positions none in its place")
        return found

    def _unbounded_rows(self) -> list[str]:
        """List why the effective number of tokens that calibration reads is undefined: rows that may exceed 1."""
        if self.row_sum in ("one", "at most one"):
            return []
        normaliser = f"model.attention.normaliser {self.normaliser}"
        if "normaliser" in self.user_parts:
            if not is_user_class(self.normaliser):  # refused as such
                return []
            why = f"which is not known of {normaliser}: take aggregation headnorm or plain"
        elif self._clips_above_one:
            why = (
                f"and those of model.attention.clip_zeta {self.clip_zeta} may not: give 1, or take aggregation headnorm"
            )
        elif self.weighs_scores_alone:
            why = (
                f"and those of {normaliser} do not: set normalise_rows (not with identity), or take aggregation "
                "headnorm"
            )
        elif self.rows.pairs_heads:
            why = f"and those of {normaliser} have either sign: take aggregation differential_norm"
        else:
            why = f"and those of {normaliser} may not: take aggregation headnorm or plain"
        return [f"model.attention.aggregation calibrated needs rows of weights that sum to 1 at most, {why}"]

    def _window_problems(self, n_layers: int) -> list[str]:
        """List windows that a model of this many blocks cannot have."""
        by_block = isinstance(self.window, list)
        listed = self.window if isinstance(self.window, list) else [self.window]
        if by_block and len(listed) != n_layers:
            return [
                f"model.attention.window has {len(listed)} entries: give one for each of the {n_layers} blocks, null "
                "where a query sees all"
            ]
        if small := [window for window in listed if window is not None and window < 1]:
            return [f"model.attention.window is {small[0]}: give at least 1"]
        if large := [window for window in listed if window is not None and window > 1 << 27]:
            return [f"model.attention.window is {large[0]}: give at most {1 << 27}"]
        if by_block and all(window is None for window in listed):
            return ["model.attention.window is null in every block: leave it out"]
        return []

    def conditional_settings(self) -> list[Setting]:
        """List fields that depend on other fields."""
        return [
            Setting(
                "attention.aggregation_blocks",
                self.aggregation_blocks is not None,
                self.aggregation != "plain",
                "model.attention.aggregation headnorm, headnorm_released, differential_norm or calibrated",
            ),
            Setting(
                "attention.aggregation",
                self.aggregation == "differential_norm",
                self.normaliser == "differential",
                "model.attention.normaliser differential",
            ),
            Setting(
                "attention.kv_bias_tokens",
                self.kv_bias_tokens is not None,
                self.kv_bias in ("key_value", "key"),
                "model.attention.kv_bias key_value or key",
            ),
            Setting(
                "attention.calibration",
                self.calibration != CalibrationConfig(),
                self.aggregation == "calibrated",
                "model.attention.aggregation calibrated",
            ),
            *self.calibration.conditional_settings(),
            *(
                Setting(
                    f"attention.latent.{name}",
                    getattr(self.latent, name) is not None,
                    self.latent.is_on,
                    "model.attention.latent.kv_rank 1 or more",
                )
                for name in LATENT_WIDTHS
            ),
            Setting(
                "attention.normalise_rows",
                self.normalise_rows,
                self.weighs_scores_alone,
                f"model.attention.normaliser {', '.join(SIMILARITIES[:-1])} or {SIMILARITIES[-1]}",
            ),
            Setting(
                "attention.sigmoid_bias",
                self.sigmoid_bias != "none",
                self.normaliser == "sigmoid",
                "model.attention.normaliser sigmoid",
            ),
            *(
                Setting(
                    f"attention.{name}",
                    getattr(self, name) != getattr(type(self), name),
                    self.normaliser == "softmax_clipped",
                    "model.attention.normaliser softmax_clipped",
                )
                for name in ("clip_alpha", "clip_zeta")
            ),
            *(
                Setting(
                    f"attention.{name}",
                    getattr(self, name) != getattr(type(self), name),
                    self.gate in ("channel", "head"),
                    "model.attention.gate channel or head",
                )
                for name in ("gate_at", "gate_input", "gate_activation")
            ),
            Setting(
                "attention.kv_bias_shared",
                self.kv_bias_shared,
                self.kv_bias != "none",
                "model.attention.kv_bias key, value or key_value",
            ),
        ]
