"""Kernels of a config's attention, by name and in words. A test compares them with those that run."""

from __future__ import annotations

from ..config import ModelConfig

#: Names of the kernels that an attention may run, in the order of mention, each with its words.
KERNELS = {
    "explicit": "explicit weights, 256 queries at a time, computed again in the backward pass",
    "fused": "fused scaled_dot_product_attention (bf16 on CPU: a kernel of our own; where it does not run, blocks of "
    "matrix products, their weights kept for the backward pass up to 32 MiB)",
    "window": ", two such attentions per window (bf16 on CUDA and by our kernel on CPU: one)",
    "difference": ", over the values of both heads of a pair, one head's taken from the other's",
    "prefix": ", one more such attention for the prefix",
    "distances": ", distance penalties as 8 more channels",
    "documents": ", documents of about one length together (a compiled step: explicit weights)",
    "n_eff": "; a second fused log-sum-exp for n_eff",
    "joint": "; on a GPU one kernel in Triton for output, log-sum-exp and n_eff",
    "log-sum-exp": "; log-sum-exps from the kernels, their gradients in the same backward pass",
}


def _user_parts_in_words(config: ModelConfig) -> str | None:
    """Name the parts that are a user's class, whose kernels are unknown; None without any."""
    parts = config.attention.user_parts.items()
    return ", ".join(f"model.attention.{part} {name}" for part, name in parts) or None


def explicit_because(config: ModelConfig) -> str | None:
    """Name the field, with its value, that excludes the fused kernels; None if they are used."""
    attention = config.attention
    if not attention.rows.fused:
        return f"model.attention.normaliser {attention.normaliser}"
    if config.dropout.attention:
        return f"model.dropout.attention {config.dropout.attention}, in training"
    if config.positions == "t5":
        return "model.positions t5"
    if config.positions == "alibi" and attention.prefix is not None:
        return "model.positions alibi with model.attention.prefix"
    return None


def kernels_of(config: ModelConfig) -> list[str]:
    """Return the names of the kernels that every block's attention runs, keys of :data:`KERNELS`, or the entry for a
    user's class.
    """
    if _user_parts_in_words(config) is not None:
        return ["its own"]
    if explicit_because(config) is not None:
        return ["explicit"]
    attention = config.attention
    exact = attention.aggregation == "calibrated" and attention.calibration.n_eff == "exact"
    added = {
        "window": attention.window is not None,
        "difference": attention.rows.pairs_heads,
        "prefix": attention.prefix is not None,
        "distances": config.positions == "alibi",
        "documents": attention.documents,
        "n_eff": exact and config.squares == "separate",
        "joint": exact and config.squares != "separate",
    }
    extra_keys = attention.rows.adds_key or attention.kv_bias in ("key", "key_value")
    needs_sums = any(is_added for name, is_added in added.items() if name != "difference")
    added["log-sum-exp"] = extra_keys or needs_sums
    return ["fused", *(name for name, is_added in added.items() if is_added)]


def kernel_name(config: ModelConfig) -> str:
    """Join the names of the kernels: ``fused + window + log-sum-exp``."""
    return " + ".join(kernels_of(config))


def kernel_sentence(config: ModelConfig) -> str:
    """Describe in words the kernels of every block's attention, and their results beside the output."""
    if own := _user_parts_in_words(config):
        return f"what a class of your own runs ({own})"
    reason = explicit_because(config)
    return "".join(KERNELS[name] for name in kernels_of(config)) + (f" ({reason})" if reason is not None else "")
