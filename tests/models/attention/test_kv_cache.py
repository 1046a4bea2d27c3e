"""Keys and values kept: the same logits as from the whole sequence at once, for every arm."""

import pytest
import torch
from attention_arms import ARMS, EXACT, EXPLICIT_ROWS, GATES, SEVERAL_KEYS
from oracles import in_pieces

from birthmark.models.attention.kv_cache import KeyValueCache
from birthmark.models.attention.scores import Scores
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig

POSITIONS = ("rope", "learned", "sinusoidal", "alibi", "t5", "none")
#: An arm of every kind, with all positions; all others with rotary ones. A gate's activation says nothing of a cache.
ALL_POSITIONS = ("plain", EXACT, "exact, attenuate, ρ estimated", "learned sink", "sigmoid, bias",
                 "identity, normalised", "a window", "a prefix", "off by one, prefix, window, headnorm")  # fmt: skip
EVERY = ARMS | EXPLICIT_ROWS | SEVERAL_KEYS | {name: gate for name, gate in GATES.items() if "silu" not in name}
del EVERY["a prefix longer than the text"]  # it must come at once


@pytest.mark.parametrize(
    ("arm", "positions"),
    [*((arm, "rope") for arm in EVERY), *((arm, kind) for kind in POSITIONS[1:] for arm in ALL_POSITIONS)],
)
def test_steps_through_the_cache_give_the_logits_of_the_whole(arm, positions):
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "max_seq_len": 24}
    model = born(ModelConfig(**shape, positions=positions, attention=EVERY[arm]), 0).eval()
    tokens = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(model, tokens), model(tokens), atol=2e-5, rtol=1e-5)


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
    shape = {"d_model": 16, "n_layers": 3, "n_heads": 2, "vocab_size": 40, "max_seq_len": 12}
    config = ModelConfig(**shape, attention=AttentionConfig(window=4))
    model, found = born(config, 0).eval(), []
    whole = Scores._seen
    monkeypatch.setattr(Scores, "_seen", lambda self, *places: found.append(places) or whole(self, *places))
    cache = KeyValueCache(config, 9)
    with torch.no_grad():
        model(torch.arange(8)[None], cache=cache)
        found.clear()
        model(torch.tensor([[9]]), cache=cache)
    assert len(found) == 1
