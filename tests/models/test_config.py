"""Impossible models are refused before anything is built, all problems at once, with the field's name."""

import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from birthmark.errors import UsageError
from birthmark.models.activations import ACTIVATIONS
from birthmark.models.attention.aggregation import AGGREGATIONS
from birthmark.models.attention.attention import GATES, KV_BIASES, NORMALISERS
from birthmark.models.attention.config import ROWS, SIMILARITIES
from birthmark.models.attention.correlation import CORRELATIONS
from birthmark.models.attention.normalisers import Similarity
from birthmark.models.attention.positions import POSITIONS
from birthmark.models.config import (
    GATED,
    AttentionConfig,
    CalibrationConfig,
    DropoutConfig,
    InitConfig,
    LatentConfig,
    ModelConfig,
)
from birthmark.models.init import INITIALISERS
from birthmark.models.norms import NORMS


def attention(*aggregation, calibration=None, latent=None, shape=None, **fields):
    """Fields of a model with such an attention."""
    if calibration is not None:
        fields["calibration"], aggregation = CalibrationConfig(**calibration), aggregation or ("calibrated",)
    if latent is not None:
        fields["latent"] = LatentConfig(**{"kv_rank": 16, "rope_width": 4, "nope_width": 6, "value_width": 5} | latent)
    return {"attention": AttentionConfig(*aggregation, **fields)} | (shape or {})


def differential(**fields):
    return attention("differential_norm", normaliser="differential", **fields)


NAN, INF = float("nan"), float("inf")
IMPOSSIBLE = [
    *(({name: value}, f"model.{name} ") for name in (
        "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_seq_len", "vocab_size"
    ) for value in (0, -3)),
    ({"vocab_size": 1}, "model.vocab_size "),
    ({"d_model": 30, "n_heads": 4}, "model.d_model 30"),
    ({"d_model": 2, "n_heads": 4}, "model.d_model 2"),
    ({"d_model": 12, "n_heads": 4}, "model.positions"),
    ({"n_heads": 4, "n_kv_heads": 3}, "model.n_kv_heads 3"),
    ({"n_heads": 4, "n_kv_heads": 8}, "model.n_kv_heads 8"),
    *(({"norm_eps": eps}, "model.norm_eps ") for eps in (0.0, -1e-5, NAN, INF)),
    *(({"rope_base": base}, "model.rope_base ") for base in (0.0, NAN, INF)),
    *(({"logit_softcap": cap}, "model.logit_softcap ") for cap in (0.0, -30.0, 1e300, INF)),
    (attention(normaliser="softmax_clipped", clip_alpha=1e300), "model.attention.clip_alpha is 1e+300: give a number"),
    (attention(window=1 << 28), "model.attention.window is 268435456: give at most 134217728"),
    *(({"init": InitConfig("normal", std)}, "model.init.std ") for std in (0.0, -1.0, 1e39, NAN, INF)),
    (attention(calibration={"direction": "attenuate", "t_ref": 0}), "model.attention.calibration.t_ref "),
    *(({"dropout": DropoutConfig(**{place: share})}, f"model.dropout.{place} is {share}: give at ")
      for place, share in (("residual", -0.1), ("embedding", 1.0), ("attention", NAN))),
    ({"norm_gate": 0}, "model.norm_gate is 0: give at least 1"),
    # Keys that nothing would read.
    (attention(aggregation_blocks=[0]), "model.attention.aggregation_blocks "),
    (attention("headnorm", calibration={"n_eff": "analytic"}), "model.attention.calibration "),
    (attention(calibration={"t_ref": 9}), "model.attention.calibration.t_ref "),
    (attention(calibration={"n_eff": "analytic", "gradient": False}), "model.attention.calibration.gradient "),
    *(({"init": InitConfig(kind, 0.5)}, "model.init.std ") for kind in ("fan_in", "orthogonal")),
    *(({"init": InitConfig("truncated_normal", truncate=at)}, "model.init.truncate ")
      for at in (0.0, 0.09, -2.0, 1e200, NAN, INF)),
    ({"init": InitConfig("normal", truncate=3.0)}, "model.init.truncate "),
    ({"init": InitConfig(zero=["attn.o", "embed", "attn.o"])}, "model.init.zero names attn.o twice"),
    ({"norm": "dyt", "norm_scale": True}, "model.norm_scale is set, but only model.norm rmsnorm reads it"),
    ({"norm": "none", "norm_gate": 2}, "model.norm_gate is set, but only model.norm rmsnorm, layernorm or dyt reads"),
    (attention(gate_at="value"), "gate_at is set, but only model.attention.gate channel or head reads it"),
    # Parts that the model does not have.
    ({"init": InitConfig(zero=["positions.table"])}, "model.init.zero positions.table "),
    ({"init": InitConfig(zero=["mlp.down", "mlp.gate"])}, "model.init.zero mlp.gate "),
    ({"init": InitConfig(zero=["attn.gate.map"])}, "model.init.zero attn.gate.map "),
    ({"init": InitConfig(zero=["head"]), "tie_embeddings": True}, "model.init.zero head "),
    ({"rope_base": 5.0, "positions": "learned"}, "model.rope_base "),
    ({"rope_fraction": 0.5, "positions": "learned"}, "model.rope_fraction "),
    ({"rope_fraction": 0.0}, "model.rope_fraction is 0.0"),
    ({"rope_fraction": 1.5}, "model.rope_fraction is 1.5"),
    ({"d_model": 24, "n_heads": 4, "rope_fraction": 0.5}, "model.rope_fraction of"),
    ({"d_model": 15, "n_heads": 5, "positions": "sinusoidal"}, "model.d_model 15 is odd"),
    ({"norm": "none", "norm_placement": "post"}, "model.norm_placement "),
    *((attention("headnorm", [block]), "model.attention.aggregation_blocks ") for block in (4, -1)),
    (attention(normalise_rows=True), "model.attention.normalise_rows "),
    (attention(normaliser="relu", sigmoid_bias="log_length"), "model.attention.sigmoid_bias "),
    (attention(kv_bias_shared=True), "model.attention.kv_bias_shared "),
    (attention(normaliser="sigmoid", kv_bias="key"), "model.attention.kv_bias "),
    (attention("calibrated", normaliser="sigmoid"), "model.attention.aggregation "),
    (attention("calibrated", normaliser="identity", normalise_rows=True), "model.attention.aggregation "),
    *((attention(prefix=length), "model.attention.prefix ") for length in (0, 999)),
    (attention(calibration={"rho": 0.2}), "model.attention.calibration.rho "),
    (attention(calibration={"rho": 1.0, "correlation": "learned"}), "model.attention.calibration.rho "),
    (attention(calibration={"gradient": False, "correlation": "learned"}), "model.attention.calibration.correlation "),
    *((attention(calibration={"n_eff": n_eff, "squares": "joint"}, shape=shape, **more),
       "model.attention.calibration.squares ")
      for n_eff, more, shape in (
        ("analytic", {}, {}),
        ("exact", {"prefix": 4}, {}),
        ("exact", {"normaliser": "softpick"}, {}),
        ("exact", {}, {"positions": "t5"}),
        ("exact", {}, {"dropout": DropoutConfig(attention=0.1)}),
        ("exact", {}, {"head_dim": 160}),
    )),
    ({"t5_buckets": 16}, "model.t5_buckets "),
    ({"t5_max_distance": 16}, "model.t5_max_distance "),
    *(({"positions": "t5", "t5_buckets": n}, "model.t5_buckets ") for n in (1, 300)),
    # Blocks that differ.
    (attention(window=0), "model.attention.window "),
    (attention(window=[4, None]), "model.attention.window has 2 entries: give one for each of the 4 blocks"),
    (attention(window=[4, 0, None, None]), "model.attention.window is 0: give at least 1"),
    (attention(window=[None] * 4), "model.attention.window is null in every block: leave it out"),
    (attention(nope_blocks=[4]), "model.attention.nope_blocks has [4]: blocks go from 0 to 3"),
    (attention(nope_blocks=[2, 0, 1, 3]), "model.attention.nope_blocks has all blocks: give model.positions none"),
    (attention(nope_blocks=[0], shape={"positions": "learned"}),
     "nope_blocks is set, but only model.positions rope, alibi or t5 reads it"),
    # Gates and learned keys.
    (attention(gate="head", gate_at="projection"), "gate head with model.attention.gate_at projection: "),
    (attention(kv_bias="key", kv_bias_tokens=0), "model.attention.kv_bias_tokens is 0: give 1 to 1024"),
    (attention(kv_bias="value", kv_bias_tokens=2), "but only model.attention.kv_bias key_value or key reads it"),
    # Documents.
    (attention(documents=True, prefix=4), "model.attention.documents with model.attention.prefix"),
    (attention(documents=True, normaliser="mine:Normaliser"),
     "model.attention.documents needs a normaliser that keeps documents apart"),
    (attention(normaliser="mine:Rows", shape={"dropout": DropoutConfig(attention=0.1)}),
     "whether a class of your own drops weights is not known"),
    # Differential attention.
    (differential(shape={"d_model": 24, "n_heads": 3}), "model.n_heads is 3 with 3 of keys and values: give an even"),
    (differential(shape={"n_heads": 4, "n_kv_heads": 2}), "model.n_heads is 4 with 2 of keys and values"),
    (attention(normaliser="differential", kv_bias="key"), "kv_bias key with model.att"),
    (attention("calibrated", normaliser="differential"), "have either sign"),
    (attention("differential_norm"), "only model.attention.normaliser differential reads"),
    # Latent attention.
    (attention(latent={}, shape={"n_heads": 4, "n_kv_heads": 2}),
     "model.n_kv_heads 2 with model.attention.latent: every head has keys and values of its own"),
    (attention(latent={}, shape={"positions": "alibi"}),
     "model.attention.latent.kv_rank is set, but only model.positions rope reads it"),
    (attention(latent={}, shape={"rope_fraction": 0.5}),
     "model.rope_fraction is set, but only model.attention.latent.kv_rank null reads it"),
    (attention(latent={}, qk_norm="head"), "model.attention.qk_norm head with model.attention.latent"),
    (attention(latent={}, v_norm="width"), "model.attention.v_norm width with model.attention.latent"),
    (attention(latent={}, gate="head", gate_at="key"), "give output, query or projection"),
    (attention(latent={}, gate="head", gate_input="value"), "model.attention.gate_input value with model.attention"),
    (attention(latent={"rope_width": 3}),
     "model.attention.latent.rope_width is 3: rotary positions need an even number"),
    (attention(latent={"value_width": 11}), "model.attention.latent.value_width is 11, and keys have 10 channels"),
    (attention(latent={"kv_rank": 0}), "model.attention.latent.kv_rank is 0"),
    ({"attention": AttentionConfig(latent=LatentConfig(q_rank=4))},
     "latent.q_rank is set, but only model.attention.latent.kv_rank 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), IMPOSSIBLE, ids=[f"{f}" for f, _ in IMPOSSIBLE])
def test_an_impossible_model_is_refused_by_the_name_of_its_field(fields, named):
    with pytest.raises(UsageError, match=re.escape(named)) as caught:
        ModelConfig(**fields)
    # This problem and no other, but for widths that follow from an impossible one.
    others = {"d_model": "d_ff", "n_heads": "n_kv_heads"}
    problems = [part for part in str(caught.value).split("; ") if part.startswith("model.")]
    name = named.removeprefix("model.").strip()
    assert [p for p in problems[1:] if not p.startswith(f"model.{others.get(name)} ")] == []


def test_all_problems_are_named_at_once():
    with pytest.raises(UsageError) as caught:
        ModelConfig(
            d_model=30, n_heads=4, n_kv_heads=3, norm_eps=0, rope_base=-1, init=InitConfig("normal", std=0),
            attention=AttentionConfig("calibrated", [9, 1], CalibrationConfig(direction="attenuate", t_ref=0)),
        )  # fmt: skip
    message = str(caught.value)
    named = ["d_model 30", "n_kv_heads 3", "norm_eps", "rope_base", "init.std", "t_ref", "[9]"]
    assert [name for name in named if name not in message] == []
    assert len(message.split("; ")) == len(named)
    with pytest.raises(UsageError) as caught:
        ModelConfig(d_model=0, n_layers=-1, vocab_size=0, max_seq_len=0, norm_eps=-1)
    message = str(caught.value)
    assert all(f"model.{n} " in message for n in ("d_model", "n_layers", "vocab_size", "max_seq_len", "norm_eps"))


@pytest.mark.parametrize(
    "fields",
    [
        {"d_model": 12, "n_heads": 4, "positions": "learned"},  # odd heads are fine where nothing turns
        {"d_model": 12, "n_heads": 4, "positions": "none"},
        {"d_model": 1, "n_heads": 1, "positions": "none", "vocab_size": 2, "n_layers": 1, "max_seq_len": 1},
        {"n_heads": 4, "n_kv_heads": 1},
        {"attention": AttentionConfig("headnorm", [0, 3])},
        {"attention": AttentionConfig("headnorm", [])},
        {"attention": AttentionConfig("calibrated", calibration=CalibrationConfig(direction="attenuate", t_ref=1))},
        {"init": InitConfig("truncated_normal", 0.05, 0.1)},
        {"init": InitConfig("orthogonal", zero=["embed", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "head"])},
        {"init": InitConfig(zero=["positions.table"]), "positions": "learned"},
        {"init": InitConfig(zero=["positions.table"]), "positions": "t5"},
        {"init": InitConfig(zero=["mlp.gate"]), "mlp": "swiglu"},
    ],
    ids=str,
)
def test_unusual_but_possible_models_are_accepted(fields):
    assert ModelConfig(**fields).problems() == []


@pytest.mark.parametrize(
    ("d_model", "mlp", "width"),
    [(256, "gelu", 1024), (256, "swiglu", 704), (96, "swiglu", 256), (768, "geglu", 2048), (4096, "reglu", 10944)],
)
def test_the_default_mlp_width(d_model, mlp, width):
    """4·d, and for gated ones the next multiple of 32 from 8/3·d up."""
    assert ModelConfig(d_model=d_model, mlp=mlp).ff == width
    assert ModelConfig(d_model=d_model, mlp=mlp, d_ff=17).ff == 17


def names(config: type, field: str) -> set[str]:
    """Names that a field may have; some may be a class of the user's own instead."""
    found = get_args(get_type_hints(config)[field])
    return set(get_args(found[0]) if get_origin(found[0]) is Literal else found)


def test_every_name_of_a_config_has_its_row_in_a_table():
    assert names(AttentionConfig, "normaliser") == set(NORMALISERS) == set(ROWS)
    assert names(AttentionConfig, "aggregation") == {name.partition("-")[0] for name in AGGREGATIONS}
    assert names(CalibrationConfig, "n_eff") == {name.partition("-")[2] for name in AGGREGATIONS} - {""}
    assert names(CalibrationConfig, "correlation") == set(CORRELATIONS)
    assert names(AttentionConfig, "gate") == set(GATES)
    assert names(AttentionConfig, "kv_bias") == set(KV_BIASES)
    assert names(ModelConfig, "positions") == set(POSITIONS)
    assert names(ModelConfig, "norm") == set(NORMS)
    assert names(ModelConfig, "mlp") == ACTIVATIONS.keys() | GATED.keys()
    assert names(InitConfig, "kind") == set(INITIALISERS)
    assert set(SIMILARITIES) == {name for name, kind in NORMALISERS.items() if issubclass(kind, Similarity)}
