"""Kinds of attention that tests compare, by name."""

from itertools import product

from birthmark.models.attention.config import SIMILARITIES
from birthmark.models.config import AttentionConfig, CalibrationConfig


def calibrated(
    n_eff="exact", direction="amplify", t_ref=None, gradient=True, correlation="none", squares="auto", **more
):
    calibration = CalibrationConfig(n_eff, direction, t_ref, gradient, correlation, squares=squares)
    return AttentionConfig("calibrated", calibration=calibration, **more)


AGGREGATIONS = {
    "plain": AttentionConfig(),
    "headnorm": AttentionConfig("headnorm"),
    "headnorm as released": AttentionConfig("headnorm_released"),
} | {
    f"{n_eff}, {direction}, t_ref {t_ref}, gradient {gradient}": calibrated(n_eff, direction, t_ref, gradient)
    for n_eff, direction, t_ref, gradient in product(
        ("analytic", "exact"), ("amplify", "attenuate"), (None, 7), (True, False)
    )
    # The others set what nothing reads, and are refused.
    if (t_ref is None or direction == "attenuate") and (gradient or n_eff == "exact")
}
EXACT = "exact, amplify, t_ref None, gradient True"
CORRELATED = {
    f"{n_eff}, {direction}, ρ {correlation}": calibrated(n_eff, direction, correlation=correlation)
    for n_eff, direction, correlation in product(
        ("analytic", "exact"), ("amplify", "attenuate"), ("estimated", "learned")
    )
}
NORMALISERS = {
    "off by one": AttentionConfig(normaliser="softmax_off_by_one"),
    "learned sink": AttentionConfig(normaliser="softmax_sink"),
    "sigmoid, bias": AttentionConfig(normaliser="sigmoid", sigmoid_bias="log_length"),
} | {
    f"{kind}{', normalised' if rows else ''}": AttentionConfig(normaliser=kind, normalise_rows=rows)
    for kind, rows in product(SIMILARITIES, (False, True))
}
#: Normalisers whose rows have formulas of their own.
EXPLICIT_ROWS = {
    "softpick": AttentionConfig(normaliser="softpick"),
    "softpick, key and value, window": AttentionConfig(normaliser="softpick", kv_bias="key_value", window=6),
    "clipped": AttentionConfig(normaliser="softmax_clipped", clip_alpha=0.7),
    "clipped above too, headnorm": AttentionConfig("headnorm", normaliser="softmax_clipped", clip_zeta=1.03),
}
AROUND = {
    "gate per head": AttentionConfig(gate="head"),
    "gate per channel": AttentionConfig(gate="channel"),
    "norm of each head's queries and keys": AttentionConfig(qk_norm="head"),
    "norm of all queries and keys": AttentionConfig(qk_norm="width"),
    "biases of queries, keys and values": AttentionConfig(qkv_bias=True),
    "no biases of queries, keys and values": AttentionConfig(qkv_bias=False),
    "all at once": AttentionConfig("headnorm", gate="channel", qk_norm="head"),
    "all at once, exact": AttentionConfig("calibrated", gate="head", qk_norm="width"),
    "calibrated beside a sink": AttentionConfig("calibrated", normaliser="softmax_sink", kv_bias="key"),
    "calibrated beside a sink, explicit": AttentionConfig("calibrated", normaliser="softmax_off_by_one", prefix=2),
    "a window": AttentionConfig(window=4),
    "a window of one": AttentionConfig(window=1),
    "a window longer than the text": AttentionConfig(window=40),
    "a prefix": AttentionConfig(prefix=3),
    "a prefix longer than the text": AttentionConfig(prefix=20),
    "a window and a prefix": AttentionConfig(window=2, prefix=5),
    "key bias": AttentionConfig(kv_bias="key"),
    "value bias": AttentionConfig(kv_bias="value"),
    "key and value bias": AttentionConfig(kv_bias="key_value"),
    "one key and value bias": AttentionConfig(kv_bias="key_value", kv_bias_shared=True),
}
# What meets in one row of weights, pairwise and more.
TOGETHER = {
    "sink, key bias, window, exact": calibrated(normaliser="softmax_sink", kv_bias="key_value", window=4),
    "off by one, prefix, window, headnorm": AttentionConfig(
        "headnorm", normaliser="softmax_off_by_one", prefix=4, window=3
    ),
    "normalised sigmoid, key bias, window": AttentionConfig(
        normaliser="sigmoid", normalise_rows=True, kv_bias="key", window=5
    ),
    "relu, key and value bias, prefix": AttentionConfig(normaliser="relu", kv_bias="key_value", prefix=4),
    "identity, normalised, key bias": AttentionConfig(normaliser="identity", normalise_rows=True, kv_bias="key_value"),
    "normalised elu, exact, estimated": calibrated(
        direction="attenuate", correlation="estimated", normaliser="elu", normalise_rows=True
    ),
    "off by one, exact, learned": calibrated(correlation="learned", normaliser="softmax_off_by_one", prefix=2),
}
GATES = {
    f"gate per {gate} at {at}, reads {read}, {activation}": AttentionConfig(
        gate=gate, gate_at=at, gate_input=read, gate_activation=activation
    )
    for gate, at, read, activation in product(
        ("head", "channel"), ("output", "value", "key", "query", "projection"), ("input", "value"), ("sigmoid", "silu")
    )
    if not (gate == "head" and at == "projection")
}
SEVERAL_KEYS = {
    "three keys": AttentionConfig(kv_bias="key", kv_bias_tokens=3),
    "three keys, norm of each head's values": AttentionConfig(kv_bias="key_value", kv_bias_tokens=3, v_norm="head"),
    "three shared keys, norm of all values": AttentionConfig(
        kv_bias="key_value", kv_bias_tokens=3, kv_bias_shared=True, v_norm="width"
    ),
    "three keys, sigmoid": AttentionConfig(normaliser="sigmoid", kv_bias="key_value", kv_bias_tokens=3),
    "three keys, sink": AttentionConfig(normaliser="softmax_sink", kv_bias="key_value", kv_bias_tokens=3),
}
ARMS = AGGREGATIONS | CORRELATED | NORMALISERS | AROUND | TOGETHER
