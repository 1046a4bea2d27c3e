"""What makes a model's config impossible: values out of range, parts that make no sense together, fields unread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import AttentionConfig, ModelConfig


def problems(config: ModelConfig) -> list[str]:
    """Everything that makes this config impossible, one line each, with the mend; empty if it is sound."""
    found = [
        f"model.{name} is {value}: give at least 1"
        for name, value in (
            ("d_model", config.d_model),
            ("n_layers", config.n_layers),
            ("n_heads", config.n_heads),
            ("n_kv_heads", config.kv_heads),
            ("head_dim", 1 if config.head_dim is None else config.head_dim),
            ("d_ff", config.ff),
            ("max_seq_len", config.max_seq_len),
        )
        if value < 1
    ]
    if config.vocab_size < 2:
        found.append(f"model.vocab_size is {config.vocab_size}: give at least 2")
    if not found:
        if config.head_dim is None and config.d_model % config.n_heads:
            found.append(
                f"model.d_model {config.d_model} is not divisible by model.n_heads {config.n_heads}: "
                f"give a multiple of {config.n_heads}, or model.head_dim"
            )
        elif not 0 < config.rope_fraction <= 1:
            found.append(f"model.rope_fraction is {config.rope_fraction}: give a number above 0 and at most 1")
        elif config.positions == "rope" and (config.d_rope < 2 or config.d_rope % 2):
            found.append(
                f"model.rope_fraction of model.d_model/model.n_heads is {config.d_rope}: rotary positions need an "
                "even number of channels, change one of these or model.positions"
            )
        if config.positions == "sinusoidal" and config.d_model % 2:
            found.append(f"model.d_model {config.d_model} is odd: model.positions sinusoidal needs pairs of channels")
        if config.positions == "t5" and not 2 <= config.t5_buckets < 2 * config.t5_max_distance:
            found.append(
                f"model.t5_buckets is {config.t5_buckets}: give at least 2, and fewer than twice "
                f"model.t5_max_distance {config.t5_max_distance}"
            )
        if config.n_heads % config.kv_heads:
            found.append(
                f"model.n_heads {config.n_heads} is not divisible by model.n_kv_heads {config.kv_heads}: "
                f"give a divisor of {config.n_heads}"
            )
    if not 0 < config.norm_eps < float("inf"):
        found.append(f"model.norm_eps is {config.norm_eps}: give a positive number")
    if not 0 < config.rope_base < float("inf"):
        found.append(f"model.rope_base is {config.rope_base}: give a positive number")
    if not 0 < config.init.std < float("inf"):
        found.append(f"model.init.std is {config.init.std}: give a positive number")
    if not 0.1 <= config.init.truncate < float("inf"):
        found.append(f"model.init.truncate is {config.init.truncate}: give a number from 0.1 on")
    twice = sorted({part for part in config.init.zero if config.init.zero.count(part) > 1})
    if twice:
        found.append(f"model.init.zero names {', '.join(twice)} twice: name each part once")
    found += _attention_problems(config.attention, config.max_seq_len)
    outside = [b for b in config.attention.aggregation_blocks or [] if not 0 <= b < config.n_layers]
    if outside:
        found.append(f"model.attention.aggregation_blocks has {outside}: blocks go from 0 to {config.n_layers - 1}")
    return found + _unread(config)


def _attention_problems(attention: AttentionConfig, max_seq_len: int) -> list[str]:
    """Everything that makes these parts impossible by themselves or together."""
    calibration, found = attention.calibration, []
    if calibration.t_ref is not None and calibration.t_ref < 1:
        found.append(f"model.attention.calibration.t_ref is {calibration.t_ref}: give at least 1")
    if not 0 < calibration.rho < 1:
        found.append(f"model.attention.calibration.rho is {calibration.rho}: give a number between 0 and 1")
    if attention.window is not None and attention.window < 1:
        found.append(f"model.attention.window is {attention.window}: give at least 1")
    if attention.prefix is not None and not 1 <= attention.prefix <= max_seq_len:
        found.append(
            f"model.attention.prefix is {attention.prefix}: give at least 1 and at most model.max_seq_len {max_seq_len}"
        )
    if attention.weighs_scores_alone and not attention.normalise_rows and attention.kv_bias == "key":
        found.append(
            f"model.attention.kv_bias key changes nothing under model.attention.normaliser {attention.normaliser} "
            "without normalise_rows: a key of value 0 takes no weight from the others, give key_value"
        )
    if attention.aggregation == "calibrated":
        if attention.weighs_scores_alone and (not attention.normalise_rows or attention.normaliser == "identity"):
            found.append(
                f"model.attention.aggregation calibrated needs rows of weights that sum to 1 at most, and those of "
                f"model.attention.normaliser {attention.normaliser} do not: set normalise_rows (not with identity), or "
                "take aggregation headnorm"
            )
        if calibration.correlation == "learned" and not calibration.gradient:
            found.append(
                "model.attention.calibration.correlation learned is never learned with gradient false: "
                "give correlation estimated, or gradient true"
            )
    return found


def _unread(config: ModelConfig) -> list[str]:
    """Fields that were set although nothing reads them under the others: a key is never ignored."""
    attention, calibration = config.attention, config.attention.calibration
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
            calibration != type(calibration)(),
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
            "attention.calibration.rho",
            calibration.rho != type(calibration).rho,
            calibration.correlation == "learned",
            "model.attention.calibration.correlation learned",
        ),
        (
            "attention.normalise_rows",
            attention.normalise_rows,
            attention.weighs_scores_alone,
            "model.attention.normaliser sigmoid, relu, elu or identity",
        ),
        (
            "attention.sigmoid_bias",
            attention.sigmoid_bias != "none",
            attention.normaliser == "sigmoid",
            "model.attention.normaliser sigmoid",
        ),
        (
            "attention.kv_bias_shared",
            attention.kv_bias_shared,
            attention.kv_bias != "none",
            "model.attention.kv_bias key, value or key_value",
        ),
        ("t5_buckets", config.t5_buckets != type(config).t5_buckets, config.positions == "t5", "model.positions t5"),
        (
            "t5_max_distance",
            config.t5_max_distance != type(config).t5_max_distance,
            config.positions == "t5",
            "model.positions t5",
        ),
        (
            "init.std",
            config.init.std != type(config.init).std,
            config.init.kind in ("normal", "truncated_normal", "gpt2"),
            "model.init.kind normal, truncated_normal or gpt2",
        ),
        (
            "init.truncate",
            config.init.truncate != type(config.init).truncate,
            config.init.kind == "truncated_normal",
            "model.init.kind truncated_normal",
        ),
        *(
            (f"init.zero {part}", part in config.init.zero, exists, where)
            for part, exists, where in (
                ("positions.table", config.positions in ("learned", "t5"), "model.positions learned or t5"),
                ("attn.gate.map", attention.gate != "none", "model.attention.gate head or channel"),
                ("mlp.gate", config.gated, "a gated model.mlp"),
                ("head", not config.tie_embeddings, "model.tie_embeddings false"),
            )
        ),
        ("rope_base", config.rope_base != type(config).rope_base, config.positions == "rope", "model.positions rope"),
        ("rope_fraction", config.rope_fraction != 1, config.positions == "rope", "model.positions rope"),
        ("norm_placement", config.norm_placement != "pre", config.norm != "none", "model.norm rmsnorm or layernorm"),
    )
    return [
        f"model.{name} is set, but only {reader} reads it: leave it out or change that"
        for name, is_set, is_read, reader in settings
        if is_set and not is_read
    ]
