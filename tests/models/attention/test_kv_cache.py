"""Keys and values kept: the same logits as from the whole sequence at once, for every arm."""

from __future__ import annotations

import pytest
import torch

from birthmark.models.attention.kv_cache import KeyValueCache
from birthmark.models.attention.scores import Scores
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig

ARMS = {
    "plain": AttentionConfig(),
    "headnorm": AttentionConfig("headnorm"),
    "analytic": AttentionConfig("calibrated", calibration=CalibrationConfig("analytic", direction="attenuate")),
    "correlated": AttentionConfig("calibrated", calibration=CalibrationConfig(correlation="estimated")),
    "learned sink": AttentionConfig(normaliser="softmax_sink"),
    "off by one, key and value bias": AttentionConfig(normaliser="softmax_off_by_one", kv_bias="key_value"),
    "sigmoid": AttentionConfig(normaliser="sigmoid", sigmoid_bias="log_length"),
    "normalised identity": AttentionConfig(normaliser="identity", normalise_rows=True),
    "window": AttentionConfig(window=4),
    "window, gate, norms": AttentionConfig("headnorm", window=5, gate="channel", qk_norm="width"),
    "prefix": AttentionConfig(prefix=6),
}


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "alibi", "t5", "none"])
@pytest.mark.parametrize("arm", ARMS)
def test_steps_through_the_cache_give_the_logits_of_the_whole(arm, positions):
    config = ModelConfig(
        d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=61, max_seq_len=24, positions=positions,
        attention=ARMS[arm],
    )  # fmt: skip
    model = born(config, 0).eval()
    tokens = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        # The prompt at once, then one token, several, one, one.
        cache, parts = KeyValueCache(config, 20), []
        for part in tokens.split([9, 1, 8, 1, 1], dim=1):
            assert cache.length == sum(part.shape[1] for part in parts)
            parts.append(model(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_comes_first_decides_the_type(dtype):
    cache = KeyValueCache(ModelConfig(d_model=32, n_layers=1, vocab_size=61), 4).layers[0]
    k, v = torch.ones(2, 3, 1, 5, dtype=dtype), torch.ones(2, 3, 1, 6, dtype=dtype)
    cache.extend(k, v)
    assert [(x.dtype, tuple(x.shape)) for x in cache.extend(2 * k, v)] == [(dtype, (2, 3, 2, 5)), (dtype, (2, 3, 2, 6))]


def test_more_than_it_was_made_for_is_refused():
    config = ModelConfig(d_model=32, n_layers=1, vocab_size=61)
    cache = KeyValueCache(config, 4)
    with torch.no_grad(), pytest.raises(ValueError, match="holds 4"):
        born(config, 0)(torch.zeros(1, 5, dtype=torch.long), cache=cache)


def test_what_one_block_finds_of_the_keys_in_sight_serves_all(monkeypatch):
    config = ModelConfig(
        d_model=16, n_layers=3, n_heads=2, vocab_size=40, max_seq_len=12, attention=AttentionConfig(window=4)
    )
    model, found = born(config, 0).eval(), []
    whole = Scores._seen
    monkeypatch.setattr(Scores, "_seen", lambda self, *places: found.append(places) or whole(self, *places))
    cache = KeyValueCache(config, 9)
    with torch.no_grad():
        model(torch.arange(8)[None], cache=cache)
        found.clear()
        model(torch.tensor([[9]]), cache=cache)
    assert len(found) == 1
