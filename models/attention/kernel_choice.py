"""Which kernel the attention of a config runs on, in words; what the parts do at run time is tested to agree."""

from __future__ import annotations

from ..config import ModelConfig


def falls_back(config: ModelConfig) -> str | None:
    """The field that keeps attention from the fused kernels, with its value; None where they are used."""
    attention = config.attention
    if attention.weighs_scores_alone:
        return f"model.attention.normaliser {attention.normaliser}"
    if config.positions == "t5":
        return "model.positions t5"
    if config.positions == "alibi" and attention.prefix is not None:
        return "model.positions alibi with model.attention.prefix"
    return None


def kernel(config: ModelConfig) -> str:
    """The kernel of every block's attention, and what it computes beside its output."""
    attention, reason = config.attention, falls_back(config)
    if reason is not None:
        return f"explicit weights, 256 queries at a time, computed again in the backward pass ({reason})"
    told = "fused scaled_dot_product_attention (bf16 on CPU: blocks of matrix products, "
    told += "their weights kept for the backward pass up to 32 MiB)"
    if attention.window is not None:
        told += ", two per window"
    if attention.prefix is not None:
        told += ", one more for the prefix"
    if config.positions == "alibi":
        told += ", distance penalties as 8 more channels"
    exact = attention.aggregation == "calibrated" and attention.calibration.n_eff == "exact"
    if exact:
        told += "; a second fused log-sum-exp for n_eff"
    extra = attention.normaliser != "softmax" or attention.kv_bias in ("key", "key_value")
    if exact or extra or attention.window is not None or attention.prefix is not None or config.positions == "alibi":
        told += "; log-sum-exps from the kernel on CPU, 256 queries at a time elsewhere"
    return told
