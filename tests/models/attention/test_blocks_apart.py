"""Blocks whose attention differs: windows in some of them, no positions in others."""

from dataclasses import replace

import pytest
import torch
from oracles import in_pieces

from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.research.changes.change import ModelWeights
from birthmark.research.changes.sizes import BlockDropping
from birthmark.trainer.throughput import flops_per_token

SIZES = {"d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "max_seq_len": 24}
WINDOWS = [4, None, 6]
NOPE = [1]


def config(positions="rope", **attention):
    return ModelConfig(**SIZES, positions=positions, attention=AttentionConfig(**attention))


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rope", "alibi", "t5"])
def test_each_block_is_that_of_a_model_which_has_its_kind_alone(positions):
    mixed = born(config(positions, window=WINDOWS, nope_blocks=NOPE), 0).eval()
    plain = born(config(positions), 0).eval()
    assert all(torch.equal(a, b) for a, b in zip(mixed.parameters(), plain.parameters(), strict=True))
    tokens_BT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))

    x, place = plain.enter(tokens_BT)
    for i, window in enumerate(WINDOWS):
        kind = "none" if i in NOPE else positions
        of_kind = born(config(kind, window=window), 0).eval()
        x = of_kind.blocks[i](x, of_kind.enter(tokens_BT)[1] if kind == "none" else place)
    expected = plain.leave(x)
    torch.testing.assert_close(mixed(tokens_BT), expected, atol=1e-5, rtol=1e-5)
    assert (plain(tokens_BT) - expected).abs().max() > 1e-3  # windows and positions do something here

    torch.testing.assert_close(in_pieces(mixed, tokens_BT), expected, atol=2e-5, rtol=1e-5)


def test_operations_count_each_window():
    some, plain = config(window=WINDOWS), config()
    per_key = 12.0 * 4 * 8
    assert flops_per_token(plain, 0, 20) - flops_per_token(some, 0, 20) == per_key * (3 * 20 - (4 + 20 + 6))
    whole = config(window=4)
    assert flops_per_token(plain, 0, 20) - flops_per_token(whole, 0, 20) == per_key * 3 * 16


def test_blocks_that_are_left_out_take_their_windows_along():
    mixed = born(config(window=WINDOWS, nope_blocks=NOPE), 0)
    shorter = BlockDropping([0]).changed(ModelWeights(mixed.config, mixed.state_dict()), 0, None).config.attention
    assert (shorter.window, shorter.nope_blocks) == ([None, 6], [0])
    windowed = replace(mixed.config, attention=AttentionConfig(window=WINDOWS))
    last = BlockDropping([0, 2]).changed(ModelWeights(windowed, mixed.state_dict()), 0, None)
    assert last.config.attention.window is None
