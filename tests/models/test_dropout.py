"""Masks of dropout: their shares, what they depend on and what not, and where a decoder applies them."""

from dataclasses import replace

import pytest
import torch

from birthmark.models.attention import normalisers
from birthmark.models.attention.positions import Placement
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, DropoutConfig, ModelConfig
from birthmark.models.dropout import Dropout, keys_of_samples

CONFIG = ModelConfig(
    d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=12, positions="none", mlp="gelu",
    dropout=DropoutConfig(embedding=0.1, residual=0.25, attention=0.4),
)  # fmt: skip


def dropout(numbers=range(3), seed=0, **rates):
    return Dropout(replace(CONFIG.dropout, **rates), torch.from_numpy(keys_of_samples(seed, numbers)))


def test_as_many_are_dropped_as_asked_everywhere_and_the_mean_stays():
    x_BTD = torch.ones(3, 256, 192)
    for place, rate in (("embedding", 0.1), ("attention", 0.25), ("mlp", 0.25)):
        y_BTD = dropout().in_block(2).of_stream(x_BTD, place)
        assert set(y_BTD.unique().tolist()) == {0.0, torch.tensor(1 / (1 - rate)).item()}
        gone = (y_BTD == 0).double()
        # Five standard errors of what is independent, over the whole, by channel and by position.
        for dims in ((0, 1, 2), (0, 1), (0, 2)):
            shares = gone.mean(dims)
            n = gone.numel() / shares.numel()
            assert (shares - rate).abs().max() < 5 * (rate * (1 - rate) / n) ** 0.5
    weights_BHTS = torch.ones(3, 4, 64, 64)
    gone = (dropout().of_weights(weights_BHTS, 0, 64) == 0).double()
    assert (gone.mean((0, 2, 3)) - 0.4).abs().max() < 5 * (0.24 / (3 * 64 * 64)) ** 0.5


def test_masks_depend_on_sample_seed_block_and_place_and_on_nothing_else():
    x_BTD = torch.ones(3, 32, 64)
    of = lambda found: (found.of_stream(x_BTD, "mlp") == 0).flatten().double()  # noqa: E731
    first = of(dropout())
    others = [of(dropout(seed=1)), of(dropout().in_block(1)), of(dropout(range(3, 6)))]
    others.append((dropout().of_stream(x_BTD, "attention") == 0).flatten().double())
    for i, one in enumerate([first, *others]):
        for other in others[i:]:
            assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 5 / len(first) ** 0.5
    state = torch.random.get_rng_state()
    alone = dropout([1]).of_stream(x_BTD[:1], "mlp")
    assert torch.equal(alone[0], dropout().of_stream(x_BTD, "mlp")[1])
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = torch.ones(3, 2, 8, 8)
    parts = [dropout().of_weights(weights[:, :, start:stop], start, 8) for start, stop in ((0, 5), (5, 8))]
    assert torch.equal(torch.cat(parts, 2), dropout().of_weights(weights, 0, 8))


@pytest.mark.parametrize("normaliser", ["softmax", "softmax_off_by_one", "sigmoid"])
def test_a_block_drops_weights_and_what_its_sublayers_give(normaliser, monkeypatch):
    """Rows of weights come five queries at a time: their masks are those of the whole."""
    monkeypatch.setattr(normalisers, "_QUERY_BLOCK", 5)
    model = born(replace(CONFIG, attention=AttentionConfig(normaliser=normaliser)), 0).double()
    block, masks = model.blocks[1], dropout()
    x_BTD = torch.randn(3, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inside = masks.in_block(2)
    normed = block.norm_attn(x_BTD)
    q, k, v = (getattr(block.attn, name)(normed) for name in "qkv")
    scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~torch.ones(12, 12).tril().bool(), -torch.inf)
    if normaliser == "sigmoid":
        weights = scores.sigmoid()
    else:
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + (normaliser == "softmax_off_by_one"))
    out = block.attn.o((inside.of_weights(weights, 0, 12) @ v).transpose(1, 2).flatten(2))
    attended = x_BTD + inside.of_stream(out, "attention")
    expected = attended + inside.of_stream(block.mlp(block.norm_mlp(attended)), "mlp")
    torch.testing.assert_close(block(x_BTD, Placement(dropout=masks)), expected, atol=1e-9, rtol=1e-7)


def test_a_pass_without_masks_drops_nothing_whatever_the_config():
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
    model = born(CONFIG, 0)
    assert torch.equal(model.train()(tokens), born(replace(CONFIG, dropout=DropoutConfig()), 0)(tokens))
    assert not torch.equal(model(tokens, dropout=dropout(range(2))), model(tokens))
