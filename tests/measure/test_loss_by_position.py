"""Losses through a cache that lets keys go, against one pass of transformers with the mask written out."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from birthmark.errors import RunError, UsageError
from birthmark.measure.loss_by_position import Arm, LengthResult, check_reach, evictions, loss_by_position
from birthmark.models.attention.kv_cache import KeyValueCache
from birthmark.models.attention.positions import Eviction
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.exchange.pretrained import load_pretrained

N, T, PREFIX = 2, 24, 8
TOKENS = np.random.default_rng(0).integers(0, 61, (N, T + 1))
CASES = {
    "first": Eviction(PREFIX, first=3),
    "window": Eviction(PREFIX, window=6),
    "window and first": Eviction(PREFIX, window=6, kept=4),
    "window and first but one": Eviction(PREFIX, first=1, window=6, kept=4),
    "before the prefix ends": Eviction(PREFIX, first=8),
    "nothing": Eviction(PREFIX),
}


def sees(query, key, case):
    """The definition, one pair of positions at a time."""
    if key > query:
        return False
    if query < case.after:
        return True
    if key < case.first:
        return False
    return case.window is None or query - key < case.window or key < case.kept


@pytest.fixture(scope="module")
def both(their_model, tmp_path_factory):
    """One set of weights with rotary positions and grouped heads: ours and theirs, in float64."""
    folder = tmp_path_factory.mktemp("llama")
    theirs = their_model("llama")
    theirs.save_pretrained(folder)
    theirs.set_attn_implementation("eager")
    return load_pretrained(folder).double(), theirs.double()


def test_losses_are_those_of_one_pass_with_the_explicit_mask(both):
    """Rotated keys keep their positions: the mask alone says what has gone."""
    ours, theirs = both
    tokens = torch.from_numpy(TOKENS)
    for name, case in CASES.items():
        mask = torch.tensor([[sees(t, j, case) for j in range(T)] for t in range(T)])
        added = torch.zeros(T, T, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        with torch.no_grad():
            logits = theirs(input_ids=tokens[:, :-1], attention_mask=added[None, None].expand(N, 1, T, T)).logits
        expected = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").numpy()
        for part in (T, 7, 1) if name == "window and first but one" else (T, 7):
            found = loss_by_position(ours, TOKENS, case, part=part, batch_size=1 if part == 7 else 8)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"{name}, {part} at once")


ARMS = {
    "learned, head norm": ({"positions": "learned"}, AttentionConfig("headnorm")),
    "alibi, sigmoid": ({"positions": "alibi"}, AttentionConfig(normaliser="sigmoid")),
    "t5, learned sink": ({"positions": "t5"}, AttentionConfig(normaliser="softmax_sink")),
    "alibi, exact": ({"positions": "alibi"}, AttentionConfig("calibrated", calibration=CalibrationConfig("exact"))),
    "window": ({}, AttentionConfig(window=9)),
    "prefix": ({}, AttentionConfig(prefix=6, kv_bias="key_value")),
}


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_has_the_same_losses_however_much_passes_at_once(name, enliven):
    more, attention = ARMS[name]
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "max_seq_len": T}
    model = enliven(born(ModelConfig(**shape, **more, attention=attention), 0)).double()
    whole = loss_by_position(model, TOKENS, None)
    # One that lets nothing go takes the way of those that do; a part may be shorter than the model's own prefix.
    for part in (7, 4):
        np.testing.assert_allclose(loss_by_position(model, TOKENS, CASES["nothing"], part=part), whole, rtol=1e-6)
    losses = loss_by_position(model, TOKENS, CASES["window and first"], part=T)
    found = loss_by_position(model, TOKENS, CASES["window and first"], part=7)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert np.isnan(whole[:, :5]).all() == (name == "prefix")
    assert abs(losses - whole)[:, PREFIX + 6 :].max() > 1e-3


def test_a_loss_that_is_not_finite_is_an_error():
    model = born(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=61), 0)
    with torch.no_grad():
        model.embed.weight[TOKENS[1, 9]] = torch.inf
    with pytest.raises(RunError, match="the model gives NaN or inf"):
        loss_by_position(model, TOKENS, None)


def test_what_nobody_sees_again_is_not_kept():
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=61)
    model, cache = born(config, 0).eval(), KeyValueCache(config, T, Eviction(10, 1, 6, 4))
    held = []
    with torch.no_grad():
        for token in torch.from_numpy(TOKENS[:, :20]).split(1, dim=1):
            model(token, cache=cache)
            held.append(cache.layers[0].length)
    assert cache.length == 20
    assert held == [*range(1, 11), *[3 + 6] * 10]


def test_arms_of_a_request():
    assert evictions([0, 1], 8, None) == {0: None, 1: Eviction(8, first=1)}
    assert evictions([0, 1], 8, 5) == {0: Eviction(8, 0, 5, 4), 1: Eviction(8, 1, 5, 4)}
    assert evictions([0, 6], 8, 5)[6] == Eviction(8, 6, 5, 6)


def test_a_cost_is_of_the_same_sequences():
    rng = np.random.default_rng(1)
    hard = 3 * rng.random((6, 1))
    whole, without = hard + np.zeros((6, 20)), hard + 0.5
    result = LengthResult("m", 4, None, [Arm(0, whole), Arm(1, np.broadcast_to(without, (6, 20)))])
    assert result.ranges == [(0, 4), (4, 8), (8, 16), (16, 20)]
    assert result.cost(result.arms[0]) is None
    assert result.cost(result.arms[1]) == pytest.approx((0.5, 0), abs=1e-12)
    # Of a prefix that is longer than what was read, no more is a range.
    assert LengthResult("m", 30, None, result.arms).ranges == [(0, 20)]
    # A prefix-LM predicts nothing within its prefix.
    assert np.isnan(Arm(0, np.where(np.arange(20) < 6, np.nan, whole)).between(0, 4)).all()
    mean, error = result.arms[0].between(4, 8)
    assert (mean, error) == pytest.approx((hard.mean(), hard.std(ddof=1) / 6**0.5))


def test_positions_that_are_not_there_are_refused():
    check_reach("m", "rope", 8, 64)
    check_reach("m", "learned", 8, 8)
    with pytest.raises(UsageError, match="m: cannot read 64 positions, its learned ones end at 8; give --to 8"):
        check_reach("m", "learned", 8, 64)
