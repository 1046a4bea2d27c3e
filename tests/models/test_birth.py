"""Birth: names and draws are a file format, the same everywhere and whatever else is built beside them."""

import hashlib
import os
import random
import struct
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from birthmark.models.birth import BLOCK, born, certificate, digest, draw, initialize_parameters
from birthmark.models.config import AttentionConfig, InitConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.init import Constant, Linear, Normal

TINY = ModelConfig(
    d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=24, vocab_size=50, max_seq_len=8,
    norm="layernorm", mlp="swiglu", positions="learned", bias=True, attention=AttentionConfig("headnorm"),
)  # fmt: skip
TINY_DIGEST = "223b3480a2246dfcf21f71c403a11ae22f7137b373bc2adc306d7df29c8ffeeb"
#: One parameter of more than four blocks of draws, so that threads take part.
WIDE = ModelConfig(d_model=64, n_layers=1, n_heads=2, vocab_size=5000, max_seq_len=8)
WIDE_DIGEST = "0dab4e315f5a426d052e6febf62e348096faf9fcbd95657467077ea79db06c60"
BROKEN = (
    "a parameter's name, or what is drawn for it, has changed. Both are a file format (definitions §1): no birth "
    "certificate written before this change can be re-created any more. Undo the change, or make it a new format."
)


def test_the_births_of_two_configs_never_change():
    assert digest(born(TINY, 0)) == TINY_DIGEST, BROKEN
    assert digest(born(WIDE, 0)) == WIDE_DIGEST, BROKEN


def slow_draw(init_seed: int, name: str, n: int, std: float) -> np.ndarray:
    """Definitions §1 written out: each block of 2^16 numbers from a Philox keyed by a hash of seed, name and block."""
    parts = []
    for block in range(-(-n // 65536)):
        key = hashlib.sha256(b"\0".join([b"birthmark/1", b"%d" % init_seed, name.encode(), b"%d" % block])).digest()
        words = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")]
        generator = np.random.Generator(np.random.Philox(key=np.array(words, dtype=np.uint64)))
        parts.append(generator.standard_normal(65536, dtype=np.float32))
    return np.concatenate(parts)[:n] * np.float32(std)


def test_the_digest_is_the_hash_of_names_shapes_and_values_by_definition():
    """Names, shapes and distributions by hand, values and bytes by the slow formula."""
    gains = {"norm.gain": 16}
    biases = {"norm.bias": 16}
    matrices = {"embed.weight": (50, 16, 16), "positions.table.weight": (8, 16, 16), "head.weight": (50, 16, 16)}
    for i in range(2):
        for x, n_out, n_in in (
            ("attn.q", 16, 16), ("attn.k", 8, 16), ("attn.v", 8, 16), ("attn.o", 16, 16),
            ("mlp.gate", 24, 16), ("mlp.up", 24, 16), ("mlp.down", 16, 24),
        ):  # fmt: skip
            matrices[f"blocks.{i}.{x}.weight"] = (n_out, n_in, n_in)
            biases[f"blocks.{i}.{x}.bias"] = n_out
        for norm in ("norm_attn", "norm_mlp"):
            gains[f"blocks.{i}.{norm}.gain"] = biases[f"blocks.{i}.{norm}.bias"] = 16
        gains[f"blocks.{i}.attn.aggregate.gain"] = 8
    values = {name: ((n,), [1.0] * n) for name, n in gains.items()}
    values |= {name: ((n,), [0.0] * n) for name, n in biases.items()}
    for name, (n_out, n_in, fan_in) in matrices.items():
        values[name] = ((n_out, n_in), slow_draw(5, name, n_out * n_in, fan_in**-0.5).tolist())
    sha = hashlib.sha256()
    for name in sorted(values):
        shape, numbers = values[name]
        sha.update(name.encode() + b"\0" + ",".join(str(n) for n in shape).encode() + b"\0")
        sha.update(struct.pack(f"<{len(numbers)}f", *numbers))
    assert digest(born(TINY, 5)) == sha.hexdigest()


def reverse_modules(module: nn.Module) -> None:
    """As if every part had been built in the opposite order."""
    for tree in list(module.modules()):
        tree._modules = dict(reversed(tree._modules.items()))
        tree._parameters = dict(reversed(tree._parameters.items()))


def test_a_birth_does_not_depend_on_how_the_modules_came_about():
    for prepare in ("built", "reversed", "meta", "used before", "bf16 and back", "frozen"):
        with torch.device("meta" if prepare == "meta" else "cpu"):
            model = Decoder(TINY)
        if prepare == "meta":
            model = model.to_empty(device="cpu")
        if prepare == "reversed":
            reverse_modules(model)
            assert next(iter(model.named_parameters()))[0] != next(iter(Decoder(TINY).named_parameters()))[0]
        if prepare == "used before":
            initialize_parameters(model, TINY, 9)
            model(torch.arange(8)[None]).sum().backward()
        if prepare == "bf16 and back":
            model = model.bfloat16().float()
        if prepare == "frozen":
            model.requires_grad_(False)
        initialize_parameters(model, TINY, 0)
        assert digest(model) == TINY_DIGEST, prepare


@pytest.mark.parametrize("n_cpus", [1, 4, None])
def test_a_birth_does_not_depend_on_the_number_of_cpus(monkeypatch, n_cpus):
    monkeypatch.setattr(os, "cpu_count", lambda: n_cpus)
    assert digest(born(WIDE, 0)) == WIDE_DIGEST


def test_a_birth_is_the_same_in_another_process_on_another_instruction_set():
    code = (
        "import torch; torch.set_num_threads(3)\n"
        "from birthmark.models.birth import *; from birthmark.models.config import *\n"
        "torch.manual_seed(7); np.random.seed(7)\n"
        f"print(torch.backends.cpu.get_cpu_capability(), digest(born({TINY!r}, 0)), digest(born({WIDE!r}, 0)))"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONHASHSEED": "1"}
    printed = subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], env=environment, text=True)
    capability, *digests = printed.split()
    assert capability in ("DEFAULT", "NO")  # the variable was heard
    assert digests == [TINY_DIGEST, WIDE_DIGEST]


SIZE = 5 * BLOCK + 17


@cache
def whole(n: int = SIZE) -> np.ndarray:
    return draw(3, "x.weight", n, Normal(0.5))


BORDERS = st.builds(lambda block, offset: block * BLOCK + offset, st.integers(0, 5), st.integers(-3, 17))


@settings(max_examples=40, deadline=None)
@given(BORDERS, BORDERS)
@example(0, SIZE)
@example(SIZE, SIZE)
@example(0, 0)
@example(BLOCK, 2 * BLOCK)
@example(BLOCK - 1, 5 * BLOCK + 1)
def test_a_slice_is_the_slice_of_the_whole(a, b):
    start, stop = sorted(np.clip([a, b], 0, SIZE).tolist())
    part = draw(3, "x.weight", SIZE, Normal(0.5), start, stop)
    assert part.dtype == np.float32
    assert np.array_equal(part, whole()[start:stop])


def test_the_whole_is_the_slow_formula_whatever_its_size():
    slow = slow_draw(3, "x.weight", SIZE, 0.5)
    assert np.array_equal(whole(), slow)
    assert np.array_equal(draw(2**63, "11.w", 99, Normal(0.5)), slow_draw(2**63, "11.w", 99, 0.5))
    for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        assert np.array_equal(draw(3, "x.weight", n, Normal(0.5)), slow[:n])
    assert np.array_equal(draw(3, "x.weight", 9, Constant(0.25), 2, 7), np.full(5, 0.25, np.float32))


def test_tied_models_count_the_table_once():
    config = replace(TINY, tie_embeddings=True)
    tied, untied = born(config, 0), born(TINY, 0)
    names = {name for name, _ in tied.named_parameters()}
    assert {name for name, _ in untied.named_parameters()} - names == {"head.weight"}
    assert certificate(tied, config, 0)["n_params"] == certificate(untied, TINY, 0)["n_params"] - 50 * 16
    assert digest(tied) != digest(untied)
    # Tied by hand, as other code does it: one tensor under two names counts under the first.
    assert untied.head is not None
    untied.head.weight = untied.embed.weight
    assert digest(untied) == digest(tied)
    initialize_parameters(untied, TINY, 1)
    assert digest(untied) == digest(born(config, 1))


def test_a_certificate_records_what_was_drawn():
    record = certificate(born(TINY, 4), TINY, 4)
    assert record["digest"] == digest(born(TINY, 4))
    assert record["init_seed"] == 4
    assert record["n_params"] == sum(int(np.prod(p["shape"])) for p in record["parameters"].values())
    assert record["parameters"]["blocks.1.mlp.down.weight"]["shape"] == [16, 24]
    assert str(24**-0.5) in record["parameters"]["blocks.1.mlp.down.weight"]["distribution"]


def attention(*aggregation, **fields):
    return {"attention": AttentionConfig(*aggregation, **fields)}


@pytest.mark.parametrize(
    ("change", "only_there"),
    [
        (attention("headnorm"), ["attn.aggregate.gain"]),
        (attention("headnorm_released"), ["attn.aggregate.gain"]),
        (attention("calibrated"), []),
        (attention(gate="head"), ["attn.gate.map.weight"]),
        (attention(gate="head", gate_at="value"), ["attn.gate.map.weight"]),
        (attention(gate="channel", gate_at="key"), ["attn.gate.map.weight"]),
        (attention(gate="channel", gate_at="projection"), ["attn.gate.map.weight"]),
        (attention(normaliser="softpick"), []),
        (attention(normaliser="softmax_clipped"), []),
        (attention(kv_bias="key_value"), ["attn.bias.key", "attn.bias.value"]),
        (attention(qk_norm="width"), ["attn.q.norm.gain", "attn.k.norm.gain"]),
        ({"bias": True}, ["attn.q.bias", "mlp.up.bias"]),
        ({"n_layers": 5}, []),
        ({"mlp": "swiglu"}, ["mlp.gate.weight"]),
        ({"mlp": "tanh"}, []),
        ({"positions": "learned"}, []),
        ({"norm": "layernorm"}, []),
        ({"tie_embeddings": True}, []),
        ({"max_seq_len": 99}, []),
        ({"n_kv_heads": 1}, []),
        ({"vocab_size": 70}, []),
    ],
)
def test_two_arms_share_every_parameter_they_have_in_common(change, only_there):
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, vocab_size=50, max_seq_len=8)
    a, b = (dict(born(c, 0).named_parameters()) for c in (config, replace(config, **change)))
    common = {name for name in a.keys() & b.keys() if a[name].shape == b[name].shape}
    for name in common:
        assert torch.equal(a[name], b[name]), name
    assert {"blocks.0.attn.q.weight", "blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"} <= common
    assert {f"blocks.0.{name}" for name in only_there} <= b.keys() - a.keys()
    if "vocab_size" in change:  # rows come first, so a longer table begins with the shorter one
        assert torch.equal(a["embed.weight"], b["embed.weight"][:50])


@pytest.mark.parametrize("shared", [False, True])
def test_the_first_of_several_learned_keys_is_the_only_one_of_a_model_that_has_one(shared):
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=50, max_seq_len=8)
    keys = {"kv_bias": "key_value", "kv_bias_shared": shared}
    one, three = (born(replace(config, **attention(**keys, kv_bias_tokens=n)), 0) for n in (1, 3))
    rows = 1 if shared else 2
    for name in ("blocks.1.attn.bias.key", "blocks.1.attn.bias.value"):
        assert three.get_parameter(name).shape == (3 * rows, 8)
        assert torch.equal(three.get_parameter(name)[:rows], one.get_parameter(name))


INITS = [InitConfig("normal", 0.05), InitConfig("gpt2", 0.05), *map(InitConfig, ("fan_in", "xavier", "kaiming"))]


@pytest.mark.parametrize("init", INITS, ids=lambda init: init.kind)
def test_draws_are_those_of_the_slow_formula_with_the_stated_deviation(init):
    config = ModelConfig(
        d_model=64, n_layers=2, n_heads=4, d_ff=144, vocab_size=400, max_seq_len=100, mlp="swiglu",
        positions="learned", init=init,
    )  # fmt: skip
    fans = dict.fromkeys("qkvo", (64, 64)) | {"gate": (64, 144), "up": (64, 144), "down": (144, 64)}
    fans |= {"embed": (64, 400), "head": (64, 400), "table": (64, 100)}
    deviation = {
        "fan_in": lambda fan_in, fan_out, name: fan_in**-0.5,
        "normal": lambda fan_in, fan_out, name: 0.05,
        "gpt2": lambda fan_in, fan_out, name: 0.05 / 2 if name in ("o", "down") else 0.05,  # √(2·2 blocks)
        "xavier": lambda fan_in, fan_out, name: (2 / (fan_in + fan_out)) ** 0.5,
        "kaiming": lambda fan_in, fan_out, name: (2 / fan_in) ** 0.5,
    }[init.kind]
    for name, parameter in born(config, 0).named_parameters():
        values = parameter.detach().numpy().ravel()
        if name.endswith("gain"):
            assert (values == 1).all()
            continue
        owner = name.split(".")[-2]
        expected = slow_draw(0, name, len(values), deviation(*fans[owner], owner))
        np.testing.assert_allclose(values, expected, rtol=1e-6, err_msg=name)


class Silent(nn.Module):
    """Owns a parameter and says nothing about it."""

    def __init__(self):
        super().__init__()
        self.secret = nn.Parameter(torch.zeros(3))


class Forgetful(Linear):
    """States two parameters of three."""

    def __init__(self):
        super().__init__(2, 2)
        self.secret = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("owner", [Silent, Forgetful])
def test_a_module_that_does_not_state_its_parameters_is_refused(owner):
    model = Decoder(TINY)
    model.blocks[1].extra = owner()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match="secret"):
        initialize_parameters(model, TINY, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_no_random_state_of_others_is_read_or_changed():
    def states():
        python, numpy = random.getstate(), np.random.get_state()
        return torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2:], python

    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = states()
        digests.add(digest(born(TINY, 0)))
        assert states() == before
    assert digests == {TINY_DIGEST}


def test_a_birth_in_bf16_is_the_rounded_one():
    model = Decoder(TINY).bfloat16()
    initialize_parameters(model, TINY, 0)
    for (name, rounded), exact in zip(model.named_parameters(), born(TINY, 0).parameters(), strict=True):
        assert torch.equal(rounded, exact.bfloat16()), name
