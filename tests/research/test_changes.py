"""What people do to weights: each change against its slow formula, and those that leave the function against it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from birthmark.errors import UsageError
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ExpertsConfig, InitConfig, LatentConfig, ModelConfig
from birthmark.models.exchange.pretrained import load_pretrained, write_pretrained
from birthmark.research.changes.change import decoder_of, weights_of
from birthmark.research.changes.coordinates import Rotation, check_channels, check_gate_kind, random_rotation
from birthmark.research.changes.sizes import first_tokens
from birthmark.research.changes.table import CHANGES, FUNCTION_PRESERVING, read_change

transformers.logging.set_verbosity_error()

SMALL = {"d_model": 16, "n_layers": 3, "n_heads": 2, "d_ff": 24, "vocab_size": 31, "max_seq_len": 12}
PLAIN = ModelConfig(**SMALL, mlp="swiglu", n_kv_heads=1)
TOKENS = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))

#: Architectures that put something of their own between the residual stream and the maps that read it.
ARCHITECTURES = {
    "llama": PLAIN,
    "tied": replace(PLAIN, tie_embeddings=True),
    "gpt2": ModelConfig(**SMALL, norm="layernorm", positions="learned", mlp="gelu", bias=True, tie_embeddings=True),
    "parallel": ModelConfig(**SMALL, norm="layernorm", parallel_residual=True, rope_fraction=0.5),
    "post": ModelConfig(**SMALL, norm_placement="post", attention=AttentionConfig(qk_norm="width")),
    "both": ModelConfig(**SMALL, norm_placement="both", positions="t5", t5_buckets=6, t5_max_distance=9),
    "gated": ModelConfig(
        **SMALL,
        positions="alibi",
        attention=AttentionConfig("headnorm", gate="channel", kv_bias="key_value", normaliser="softmax_sink"),
    ),
    "no norm": ModelConfig(**SMALL, norm="none", mlp="relu", bias=True),
    "latent": ModelConfig(**SMALL, mlp="swiglu", attention=AttentionConfig(latent=LatentConfig(8, 6, 4, 4, 3))),
    "sinusoidal": ModelConfig(**SMALL, positions="sinusoidal"),
}
#: What cannot be done to which of them, and the word that says why.
REFUSED = {
    ("gpt2", "flip_signs"): "only all of them together",
    ("parallel", "flip_signs"): "only all of them together",
    ("post", "rotate"): "norm_placement post",
    ("both", "rotate"): "norm_placement both",
    ("no norm", "scale_channels"): "has no gains",
    ("sinusoidal", "permute_channels"): "fixed waves",
    ("sinusoidal", "flip_signs"): "fixed waves",
    ("sinusoidal", "rotate"): "fixed waves",
}


@pytest.fixture
def plain(lively):
    return weights_of(lively(PLAIN))


@torch.no_grad()
def logits_of(weights):
    return decoder_of(weights)(TOKENS)


def assert_close(found, expected, kind, rtol=1e-5):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=rtol, msg=lambda message: f"{kind}: {message}")


# ── those that leave the function as it was ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_coordinates_leave_every_logit_as_it_was(name, lively):
    weights = weights_of(lively(ARCHITECTURES[name]))
    before = {tensor: value.clone() for tensor, value in weights.tensors.items()}
    expected = logits_of(weights)
    assert expected.std() > 0.3
    done = 0
    for kind in FUNCTION_PRESERVING:
        change = read_change({"kind": kind})
        if why := REFUSED.get((name, kind)):
            with pytest.raises(UsageError, match=why):
                change(weights, 5)
            continue
        changed = change(weights, 5)
        assert_close(logits_of(changed), expected, kind, rtol=1e-4)
        # It did something, it depends on the seed alone, and what it was given is as it was.
        assert any(not torch.equal(changed.tensors[t], v) for t, v in weights.tensors.items())
        again, another = change(weights, 5), change(weights, 6)
        assert all(torch.equal(again.tensors[t], v) for t, v in changed.tensors.items())
        assert any(not torch.equal(another.tensors[t], v) for t, v in changed.tensors.items())
        assert all(torch.equal(weights.tensors[t], v) for t, v in before.items())
        done += 1
    assert done >= 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_own_model_gives_the_same_logits_after_each(name, their_model, tmp_path):
    """Their class runs what was changed: from a folder of theirs into our names, changed, and back."""
    theirs = their_model(name)
    expected = theirs(TOKENS).logits
    theirs.save_pretrained(tmp_path / "theirs")
    weights = weights_of(load_pretrained(tmp_path / "theirs"))
    for kind in FUNCTION_PRESERVING:
        fields = {"kind": kind, "share": 1.0} if kind == "flip_signs" and name == "gpt2" else {"kind": kind}
        changed = read_change(fields)(weights, 1)
        write_pretrained(changed.config, changed.tensors, tmp_path / kind)
        assert_close(type(theirs).from_pretrained(tmp_path / kind).eval()(TOKENS).logits, expected, kind)


def test_a_permutation_permutes_and_flips_flip_the_rows_of_the_table(plain):
    table = plain.tensors["embed.weight"]
    moved = read_change({"kind": "permute_channels"})(plain, 3).tensors["embed.weight"]
    columns = [next(c for c in range(16) if torch.equal(moved[:, i], table[:, c])) for i in range(16)]
    assert sorted(columns) == list(range(16))
    assert columns != list(range(16))
    flipped = read_change({"kind": "flip_signs", "share": 0.25})(plain, 3).tensors["embed.weight"]
    sign = [torch.equal(flipped[:, i], -table[:, i]) for i in range(16)]
    assert sum(sign) == 4
    assert all(torch.equal(flipped[:, i], table[:, i]) for i in range(16) if not sign[i])
    few = read_change({"kind": "flip_signs", "share": 0.01})(plain, 3).tensors["embed.weight"]
    assert sum(torch.equal(few[:, i], -table[:, i]) for i in range(16)) == 1
    negated = read_change({"kind": "flip_signs", "share": 1})(plain, 3).tensors["embed.weight"]
    assert torch.equal(negated, -table)


def test_units_stand_in_another_order_in_every_block(plain):
    moved = read_change({"kind": "permute_units"})(plain, 3).tensors
    orders = []
    for i in range(3):
        name = f"blocks.{i}.mlp.up.weight"
        orders.append([next(u for u in range(24) if torch.equal(row, plain.tensors[name][u])) for row in moved[name]])
        assert sorted(orders[i]) == list(range(24))
    assert orders[0] != orders[1] != orders[2]


def test_rotations_are_orthogonal_and_keep_the_mean_that_layer_norm_takes():
    for config in (PLAIN, ARCHITECTURES["gpt2"]):
        turn = random_rotation(config, 2).numpy()
        np.testing.assert_allclose(turn @ turn.T, np.eye(16), atol=1e-12)
        assert np.abs(turn - np.eye(16)).max() > 0.3
        stays = np.allclose(turn @ np.ones(16), np.ones(16), atol=1e-12)
        assert stays == (config.norm == "layernorm")
    # Uniform, they have no side that they prefer; Q of Householder's decomposition has.
    assert {float(random_rotation(PLAIN, seed)[0, 0].sign()) for seed in range(20)} == {-1, 1}


def test_a_gain_of_0_stays_or_is_refused(lively):
    weights = weights_of(lively(ARCHITECTURES["gpt2"]))
    tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    tensors["blocks.1.norm_mlp.gain"][3] = 0
    weights = weights._replace(tensors=tensors)
    scaled = read_change({"kind": "scale_channels"})(weights, 1)
    assert_close(logits_of(scaled), logits_of(weights), "scale_channels")
    with pytest.raises(UsageError, match=r"blocks\.1\.norm_mlp\.gain has a 0 beside a bias: it cannot be moved"):
        read_change({"kind": "rotate"})(weights, 1)
    tensors["blocks.1.norm_mlp.bias"][3] = 0
    assert_close(logits_of(read_change({"kind": "rotate"})(weights, 1)), logits_of(weights), "rotate")


# ── those that do not ────────────────────────────────────────────────────────────────────────────────────────────────


def test_rounding_has_the_levels_of_the_formula(plain):
    for to, levels in (("int8", 127), ("int4", 7)):
        found = read_change({"kind": "round", "to": to})(plain).tensors
        for name, tensor in plain.tensors.items():
            if not (name.startswith("blocks.") and tensor.ndim == 2):
                assert torch.equal(found[name], tensor)
                continue
            expected = np.empty(tuple(tensor.shape))
            for row, values in enumerate(tensor.numpy()):
                step = max(abs(float(value)) for value in values) / levels
                expected[row] = [step * round(float(value) / step) for value in values]
            np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-5, atol=1e-7)
    half = read_change({"kind": "round", "to": "bf16"})(plain).tensors["norm.gain"]
    for value, before in zip(half.tolist(), plain.tensors["norm.gain"].tolist(), strict=True):
        mantissa, exponent = np.frexp(before)  # eight bits of mantissa, ties to even
        assert value == float(np.ldexp(np.round(mantissa * 256), exponent - 8))


def test_pruning_zeroes_the_smallest_of_each_matrix(plain):
    found = read_change({"kind": "prune", "share": 0.3})(plain).tensors
    for name, tensor in plain.tensors.items():
        if not (name.startswith("blocks.") and tensor.ndim == 2):
            assert torch.equal(found[name], tensor)
            continue
        gone = (found[name] == 0).numpy()
        assert gone.sum() == round(0.3 * tensor.numel())
        assert np.abs(tensor.numpy()[gone]).max() <= np.abs(tensor.numpy()[~gone]).min()
        assert torch.equal(found[name][~gone], tensor[~gone])


def test_noise_has_the_size_that_was_asked_for(plain):
    found = read_change({"kind": "noise", "share": 0.05})(plain, 1).tensors
    table = plain.tensors["embed.weight"]
    added = (found["embed.weight"] - table).numpy()
    assert added.std() == pytest.approx(0.05 * table.numpy().std(), rel=0.1)
    beside = (found["head.weight"] - plain.tensors["head.weight"]).numpy()
    assert abs(np.corrcoef(added.ravel(), beside.ravel())[0, 1]) < 0.2
    assert torch.equal(found["norm.gain"], plain.tensors["norm.gain"])


def test_a_merge_lies_on_the_line_between_two_models(plain, lively):
    other = weights_of(lively(PLAIN, 1))
    merged = read_change({"kind": "merge", "share": 0.25})(plain, other=other)
    for name, tensor in merged.tensors.items():
        expected = 0.75 * plain.tensors[name].double() + 0.25 * other.tensors[name].double()
        np.testing.assert_allclose(tensor.numpy(), expected.numpy(), atol=1e-6)
    drawn_otherwise = weights_of(born(replace(PLAIN, init=InitConfig(kind="normal", std=0.3)), 0))
    assert read_change({"kind": "merge", "share": 0.25})(plain, other=drawn_otherwise).config == plain.config
    with pytest.raises(UsageError, match="different configs"):
        read_change({"kind": "merge", "share": 0.25})(plain, other=weights_of(born(replace(PLAIN, mlp="gelu"), 0)))


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_leave_the_old_ones_as_they_were(tied, lively):
    weights = weights_of(lively(replace(PLAIN, tie_embeddings=tied)))
    longer = read_change({"kind": "extend_vocabulary", "rows": 200})(weights, 2)
    assert longer.config.vocab_size == 231
    torch.testing.assert_close(logits_of(longer)[..., :31], logits_of(weights), atol=1e-6, rtol=1e-5)
    assert logits_of(longer).shape[-1] == 231
    new = longer.tensors["embed.weight"][31:].numpy()
    old = longer.tensors["embed.weight"][:31].numpy()
    np.testing.assert_allclose(new.mean(0), old.mean(0), atol=4 * old.std(0).max() / 200**0.5)
    np.testing.assert_allclose(new.std(0), old.std(0), rtol=0.25)
    back = first_tokens(longer, 31)
    assert back.config == weights.config
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in weights.tensors.items())


def test_blocks_are_left_out_and_copied_in_the_order_that_is_given(plain):
    def passed(*order):
        model = decoder_of(plain)
        with torch.no_grad():
            x, place = model.enter(TOKENS)
            for block in order:
                x = model.blocks[block](x, place)
            return model.leave(x)

    dropped = read_change({"kind": "drop_blocks", "blocks": [1]})(plain)
    assert dropped.config.n_layers == 2
    assert torch.equal(logits_of(dropped), passed(0, 2))
    deeper = read_change({"kind": "copy_blocks", "order": [0, 1, 1, 2, 0]})(plain)
    assert deeper.config.n_layers == 5
    assert torch.equal(logits_of(deeper), passed(0, 1, 1, 2, 0))
    some = replace(PLAIN, attention=AttentionConfig(aggregation="headnorm", aggregation_blocks=[1]))
    copied = read_change({"kind": "copy_blocks", "order": [1, 0, 1]})(weights_of(born(some, 0)))
    assert copied.config.attention.aggregation_blocks == [0, 2]
    logits_of(copied)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "prun", "share": 0.5}, "kind is 'prun': did you mean prune?"),
        ({"share": 0.5}, "kind is None: known are round, "),
        ({"kind": "prune"}, "share is missing: prune needs it"),
        ({"kind": "prune", "shares": 0.5}, "shares: prune has no such field; did you mean share?"),
        ({"kind": "rotate", "share": 0.5}, "share: rotate has no such field; known are none"),
        ({"kind": "prune", "share": 1.5}, "share is 1.5: give a share between 0 and 1"),
        ({"kind": "prune", "share": "half"}, "share is 'half', not a number"),
        ({"kind": "merge", "share": 0}, "share is 0: give a share between 0 and 1"),
        ({"kind": "noise", "share": -1}, "share is -1: give a number above 0"),
        ({"kind": "flip_signs", "share": 2}, "share is 2: give a share above 0, at most 1"),
        ({"kind": "scale_channels", "factor": 1}, "factor is 1: give a number above 1"),
        ({"kind": "round", "to": "int3"}, "to is 'int3', not one of 'bf16', 'fp16', 'int8' or 'int4'"),
        ({"kind": "extend_vocabulary", "rows": 0}, "rows is 0: give 1 to"),
        ({"kind": "drop_blocks", "blocks": [1, 1]}, "give a list of different blocks"),
        ({"kind": "drop_blocks", "blocks": ["a"]}, r"blocks\[0\] is 'a', not a whole number"),
        ({"kind": "copy_blocks", "order": []}, "order has 0 blocks"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(fields, message):
    with pytest.raises(UsageError, match=message) as caught:
        read_change(fields)
    assert "\n" not in str(caught.value)


#: What stands between the residual stream and the maps that read it, and cannot follow a rotation or a factor.
IN_THE_WAY = [
    ({"norm": "dyt"}, lambda config, _: Rotation().check(config), "rotate: model.norm dyt bends each channel"),
    *(({"norm_scale": True}, check, "rotate: model.norm_scale multiplies channels")
      for check in (check_channels, check_gate_kind)),
    *(({"norm_gate": 2}, check, "rotate: model.norm_gate 2 reads what norms give")
      for check in (check_channels, check_gate_kind)),
    ({"attention": AttentionConfig(gate="channel", gate_at="projection")}, check_channels,
     "rotate: model.attention.gate_at projection multiplies channels"),
    ({"attention": AttentionConfig(gate="head", gate_input="value")}, check_gate_kind,
     "the gate of model.attention.gate_input value does not read"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "check", "message"), IN_THE_WAY)
def test_changes_that_a_part_does_not_let_pass_are_refused(fields, check, message):
    with pytest.raises(UsageError, match=message):
        check(ModelConfig(**fields), "rotate")


def test_what_a_model_does_not_have_is_one_line(plain):
    for fields, message in (
        ({"kind": "drop_blocks", "blocks": [3]}, "blocks has 3: the model has blocks 0 to 2"),
        ({"kind": "drop_blocks", "blocks": [0, 1, 2]}, "that is all of them"),
        ({"kind": "copy_blocks", "order": [0, -1]}, "order has -1: the model has blocks 0 to 2"),
        ({"kind": "merge", "share": 0.5}, "needs another model"),
    ):
        with pytest.raises(UsageError, match=message):
            read_change(fields)(plain)
    own = plain._replace(config=replace(PLAIN, attention=AttentionConfig(gate="mine:Gate")))
    with pytest.raises(UsageError, match=r"model\.attention\.gate mine:Gate reads the residual stream is not known"):
        read_change({"kind": "rotate"})(own)
    routed = plain._replace(config=replace(PLAIN, experts=ExpertsConfig(n_experts=2, n_dense=1)))
    for kind in ("permute_units", "permute_channels", "scale_channels", "rotate"):
        with pytest.raises(UsageError, match=r"model\.experts is set"):
            read_change({"kind": kind})(routed)
    with pytest.raises(UsageError, match="dense MLP would stand behind blocks with experts"):
        read_change({"kind": "copy_blocks", "order": [1, 0]})(routed)
    kept = read_change({"kind": "drop_blocks", "blocks": [0]})(routed)
    assert kept.config.experts == ExpertsConfig(n_experts=2)
    for n in (1, 40):
        with pytest.raises(UsageError, match=f"{n} tokens of a model that has 31"):
            first_tokens(plain, n)
    assert all(change.needs_other == (name == "merge") for name, change in CHANGES.items())
