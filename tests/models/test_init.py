"""Initialisers beyond the plain normal ones: truncated normals, orthogonal matrices, parts that start at zero."""

import hashlib
import re
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import Traffic
from torch.nn import functional as F

from birthmark.models.attention.positions import Placement
from birthmark.models.birth import BLOCK, born, certificate, digest, draw
from birthmark.models.config import AttentionConfig, CalibrationConfig, InitConfig, LatentConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.init import (
    Constant,
    Embedding,
    Linear,
    Normal,
    Orthogonal,
    ParameterRole,
    TruncatedNormal,
    birth_plan,
    parameter_roles,
)

#: Every part that can start at zero.
MODEL = ModelConfig(
    d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=24, vocab_size=50, max_seq_len=8,
    mlp="swiglu", positions="learned", bias=True, attention=AttentionConfig(gate="channel"),
)  # fmt: skip
PARTS = get_args(get_args(get_type_hints(InitConfig)["zero"])[0])
SIZE = 4 * BLOCK + 17


def with_init(**fields) -> ModelConfig:
    return replace(MODEL, init=InitConfig(**fields))


def values(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in born(config, seed).named_parameters()}


def part(name: str) -> str:
    """The part that a parameter ``….weight`` belongs to."""
    return ".".join(word for word in name.split(".")[:-1] if word != "blocks" and not word.isdigit())


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (InitConfig("truncated_normal", 0.05, 1.5), "e32d902260fd5358a098763ed343b99137753c56f47cf411da7fe013735241bf"),
        (InitConfig(zero=["attn.o", "mlp.down", "head"]),
         "cfcc99eae69bd63552d5838b2de80967ff87c94602c75721632f8df6cb8bc7c1"),
    ],
    ids=["truncated_normal", "zero"],
)  # fmt: skip
def test_the_births_of_two_configs_never_change(init, expected):
    """Initial values are a file format (definitions §1): no certificate outlives another digest here."""
    assert digest(born(replace(MODEL, init=init), 0)) == expected


# Truncated normals


def slow_truncated(seed: int, name: str, n: int, bound: float) -> np.ndarray:
    """The definition, element by element: what is too large takes the next number of the block's next stream."""
    out: list[float] = []
    for block in range(-(-n // 65536)):
        streams: list = []

        def stream(again: int, block: int = block) -> np.random.Generator:
            key = b"\0".join([b"birthmark/1", b"%d" % seed, name.encode(), b"%d" % block])
            key += b"\0%d" % again if again else b""
            words = np.frombuffer(hashlib.sha256(key).digest()[:16], dtype="<u8")
            return np.random.Generator(np.random.Philox(key=words))

        for _ in range(min(65536, n - 65536 * block)):
            again = 0
            while True:
                if again == len(streams):
                    streams.append(stream(again))
                number = streams[again].standard_normal(dtype=np.float32)
                if abs(number) <= bound:
                    break
                again += 1
            out.append(number)
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("bound", [0.1, 0.5, 2.0, 3.0])
def test_truncated_normals_are_the_slow_formula(bound):
    n = BLOCK + 1000
    slow = slow_truncated(3, "x.weight", n, bound) * np.float32(0.5)
    assert np.array_equal(draw(3, "x.weight", n, TruncatedNormal(0.5, bound)), slow)


BORDERS = st.builds(lambda block, offset: block * BLOCK + offset, st.integers(0, 4), st.integers(-3, 17))


@pytest.mark.heavy
@settings(max_examples=20)
@given(BORDERS, BORDERS)
@example(0, SIZE)
@example(BLOCK - 1, 4 * BLOCK + 1)
def test_a_slice_of_truncated_normals_is_the_slice_of_the_whole(a, b):
    start, stop = sorted(np.clip([a, b], 0, SIZE).tolist())
    distribution = TruncatedNormal(0.5, 0.7)
    whole = draw(3, "x", SIZE, distribution)
    assert np.array_equal(draw(3, "x", SIZE, distribution, start, stop), whole[start:stop])
    assert np.array_equal(draw(3, "x", stop, distribution), whole[:stop])


# Orthogonal matrices

SHAPES = [(600, 450), (450, 600), (64, 64), (1, 7), (7, 1), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_q_of_the_keyed_normals(shape):
    """With numpy's own LAPACK, in float64; columns of a tall matrix, rows of a wide one, R's diagonal positive."""
    n = shape[0] * shape[1]
    normals = draw(5, "x", n, Normal(1.0)).astype(np.float64).reshape(shape)
    q, r = np.linalg.qr(normals if shape[0] >= shape[1] else normals.T)
    q = q * np.sign(np.diagonal(r))
    ours = draw(5, "x", n, Orthogonal(*shape)).reshape(shape)
    np.testing.assert_allclose(ours, q if shape[0] >= shape[1] else q.T, atol=1e-6)
    short = (ours if shape[0] < shape[1] else ours.T).astype(np.float64)
    np.testing.assert_allclose(short @ short.T, np.eye(len(short)), atol=1e-6)


@pytest.mark.parametrize("shape", [(600, 450), (450, 600), (3, 5)], ids=str)
def test_a_slice_of_an_orthogonal_matrix_is_the_slice_of_the_whole(shape):
    n = shape[0] * shape[1]
    whole = draw(1, "x", n, Orthogonal(*shape))
    assert whole.dtype == np.float32
    for start, stop in ((0, n), (1, n - 1), (n // 3, n // 2), (0, 0), (n, n)):
        assert np.array_equal(draw(1, "x", n, Orthogonal(*shape), start, stop), whole[start:stop])


@pytest.mark.heavy
def test_orthogonal_matrices_do_not_depend_on_the_thread_count():
    """Smaller matrices, rounded to float32, are the same on one thread and on two anyway."""
    shape = (2048, 2048)
    before, drawn = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            drawn.append(draw(0, "x", shape[0] * shape[1], Orthogonal(*shape)))
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(*drawn)


def test_an_orthogonal_model_keeps_its_tables_normal():
    orthogonal, normal = values(with_init(kind="orthogonal")), values(MODEL)
    for name, tensor in orthogonal.items():
        if tensor.ndim == 1 or part(name) in ("embed", "positions.table", "head"):
            assert torch.equal(tensor, normal[name]), name
        else:
            gram = tensor @ tensor.T if tensor.shape[0] < tensor.shape[1] else tensor.T @ tensor
            torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kv_bias", ["key", "value", "key_value"])
def test_learned_keys_and_values_are_a_table_too(kv_bias):
    attention = AttentionConfig(kv_bias=kv_bias, kv_bias_tokens=None if kv_bias == "value" else 2)
    births = [born(replace(MODEL, attention=attention, init=InitConfig(kind)), 0) for kind in ("orthogonal", "fan_in")]
    orthogonal, normal = (dict(birth.named_parameters()) for birth in births)
    found = [name for name in normal if ".attn.bias." in name]
    assert found
    assert all(torch.equal(orthogonal[name], normal[name]) for name in found)


# Parts that start at zero


def test_the_parts_are_all_the_matrices_of_a_model():
    modules = Decoder(MODEL).named_modules()
    assert set(PARTS) == {part(f"{name}.weight") for name, m in modules if isinstance(m, (Linear, Embedding))}


@pytest.mark.parametrize("kind", ["fan_in", "gpt2", "truncated_normal", "orthogonal"])
@pytest.mark.parametrize("zero", [[], ["attn.o", "mlp.down"], ["attn.gate.map", "positions.table"], [*PARTS]], ids=str)
def test_a_part_starts_at_zero_and_all_else_as_without(kind, zero):
    config = with_init(kind=kind, zero=zero)
    ours, others = values(config), values(with_init(kind=kind))
    for name, tensor in ours.items():
        if tensor.ndim == 2 and part(name) in zero:
            assert not tensor.any(), name
            assert others[name].any(), name
        else:
            assert torch.equal(tensor, others[name]), name
    zeros = {name for name, tensor in ours.items() if tensor.ndim == 2 and not tensor.any()}
    assert {part(name) for name in zeros} == set(zero)
    assert {name for name, d in birth_plan(Decoder(config), config.init).items() if d == Constant(0.0)} >= zeros


def test_zero_leaves_the_norms_of_a_part_alone():
    config = replace(with_init(zero=["attn.q"]), attention=AttentionConfig(qk_norm="head"))
    born_values = values(config)
    assert not born_values["blocks.1.attn.q.weight"].any()
    assert (born_values["blocks.1.attn.q.norm.gain"] == 1).all()


def test_a_tied_table_may_start_at_zero():
    tied = replace(with_init(zero=["embed"]), tie_embeddings=True)
    assert not values(tied)["embed.weight"].any()
    assert values(tied)["positions.table.weight"].any()


def test_a_certificate_names_the_initialiser():
    for init, name, expected in (
        (InitConfig("truncated_normal", 0.05, 1.5), "head", "TruncatedNormal(std=0.05, truncate=1.5)"),
        (InitConfig("orthogonal"), "blocks.0.mlp.up", "Orthogonal(rows=24, columns=16)"),
        (InitConfig(zero=["mlp.up"]), "blocks.1.mlp.up", "Constant(value=0.0)"),
    ):
        config = replace(MODEL, init=init)
        assert certificate(born(config, 0), config, 0)["parameters"][f"{name}.weight"]["distribution"] == expected


RELEASED = AttentionConfig("headnorm_released")


@pytest.mark.parametrize(
    "change",
    [
        *({"init": InitConfig(kind=kind)} for kind in get_args(get_type_hints(InitConfig)["kind"])),
        {"n_kv_heads": 2},
        {"attention": replace(RELEASED, v_norm="head")},
        {"attention": replace(RELEASED, latent=LatentConfig(32, None, 8, 8, 12)), "positions": "rope"},
    ],
    ids=str,
)
def test_a_released_gain_is_born_at_the_spread_of_the_first_tokens_outputs(change):
    """Measured: the standard deviation of what the heads of the first token give, over inputs of RMS 1."""
    config = ModelConfig(**{"d_model": 128, "n_layers": 1, "n_heads": 8, "attention": RELEASED, **change})
    attention = born(config, 0).blocks[0].attn
    outputs = []
    attention.aggregate.register_forward_pre_hook(lambda _, given: outputs.append(given[0].o_BHTK))
    with torch.no_grad():
        attention(F.rms_norm(torch.randn(256, 1, 128, generator=torch.Generator().manual_seed(1)), (128,)), Placement())
    gain = attention.aggregate.gain
    assert gain.shape == (8, config.d_value)
    assert (gain == gain[0, 0]).all()
    # The weights are finite in number: a share of them has another spread than their distribution.
    assert gain[0, 0].item() == pytest.approx(outputs[0].std().item(), rel=0.03)


def test_the_released_gain_at_the_published_width():
    """.02 · √768."""
    config = ModelConfig(d_model=768, n_layers=1, n_heads=12, attention=RELEASED, init=InitConfig("gpt2", 0.02))
    with torch.device("meta"):
        plan = birth_plan(Decoder(config), config.init)
    assert plan["blocks.0.attn.aggregate.gain"] == Constant(0.554256)


# ---------------------------------------------------------------- test parameter roles
# Roles against a list by name, for a model that has every kind of parameter.

SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=24, max_seq_len=12)

#: Ends of names → role, written down by hand.
BY_NAME = {
    r"(q|k|v|o|gate|up|down|map)\.weight": "matrix",
    r"^head\.weight": "head",
    r"(^|\.)embed\.weight": "embedding",
    r"positions\.table\.weight": "embedding",
    r"\.gain$": "gain",
    r"\.bias$": "bias",
    r"attn\.bias\.(key|value)": "bias",
    r"logit": "bias",
}
LEARNED = CalibrationConfig(correlation="learned")
ARMS = {
    "gpt2": replace(SMALL, norm="layernorm", bias=True, positions="learned", tie_embeddings=True),
    "sandwich": replace(
        SMALL,
        norm_placement="both",
        mlp="swiglu",
        attention=AttentionConfig(qk_norm="head", gate="channel", kv_bias="key_value", aggregation="headnorm"),
    ),
    "released": replace(SMALL, attention=AttentionConfig(aggregation="headnorm_released")),
    "learned_sink": replace(SMALL, attention=AttentionConfig(normaliser="softmax_sink")),
    "calibrated": replace(SMALL, attention=AttentionConfig("calibrated", calibration=LEARNED)),
}


@pytest.mark.parametrize("arm", ARMS)
def test_roles_are_what_the_names_say(arm):
    with torch.device("meta"):
        model = Decoder(ARMS[arm])
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    for name, role in roles.items():
        expected = {kind for pattern, kind in BY_NAME.items() if re.search(pattern, name)}
        if arm == "released" and name.endswith("aggregate.gain"):
            expected = {"decayed_gain"}
        assert expected == {role.value}, name


def test_a_t5_table_is_a_bias_of_the_scores():
    with torch.device("meta"):
        model = Decoder(replace(SMALL, positions="t5"))
    assert parameter_roles(model)["positions.table.weight"] is ParameterRole.BIAS


def test_a_module_that_states_no_roles_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with pytest.raises(TypeError, match=r"Linear owns parameters \['weight', 'bias'\] but does not state their roles"):
        parameter_roles(model)


def test_the_gradient_of_a_table_is_torchs_to_the_bit():
    torch.manual_seed(0)
    table, ids, d = Embedding(300, 24), torch.randint(0, 90, (2, 512)), torch.randn(2, 512, 24)
    table(ids).backward(d)
    assert torch.equal(table.weight.grad, torch.autograd.grad(F.embedding(ids, table.weight), table.weight, d)[0])
    of_head = torch.randn(300, 24)
    assert torch.equal(torch.autograd.grad(table.with_table(ids)[1], table.weight, of_head)[0], of_head)


def test_the_gradient_of_a_tied_table_is_the_sum_of_an_untied_models_two():
    """In one tensor: nothing fills another of its size with zeros."""
    config = replace(MODEL, tie_embeddings=True)
    tied, untied, tokens = born(config, 0).double(), born(MODEL, 0).double(), torch.arange(16).view(2, 8) % 7
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embed.weight.detach()})
    with Traffic() as traffic:
        tied(tokens[:, :-1], targets_BS=tokens[:, 1:]).objective.backward()
    untied(tokens[:, :-1], targets_BS=tokens[:, 1:]).objective.backward()
    torch.testing.assert_close(tied.embed.weight.grad, untied.embed.weight.grad + untied.head.weight.grad)
    assert traffic.operators["index_add_"] == 2  # of tokens and of positions
    assert traffic.operators["new_zeros"] == 1
