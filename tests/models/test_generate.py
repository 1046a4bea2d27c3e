"""Writing a token at a time: the likeliest from the whole pass, and draws with the softmax's frequencies."""

from __future__ import annotations

import pytest
import torch

from birthmark.errors import UsageError
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.decoder import choose, generate


@pytest.mark.parametrize("positions", ["rope", "learned", "alibi"])
def test_greedy_generation_equals_the_whole_pass_each_time(positions, lively):
    attention = AttentionConfig("headnorm", window=6, normaliser="softmax_sink")
    config = ModelConfig(
        d_model=32, n_layers=2, n_heads=4, vocab_size=50, max_seq_len=20, positions=positions, attention=attention
    )
    model = lively(config).eval()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = tokens
    with torch.no_grad():
        for _ in range(17):
            expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    written = torch.stack(list(generate(model, tokens, 17, temperature=0)), dim=1)
    assert torch.equal(written, expected[:, 3:])


def test_choices_have_the_softmax_frequencies_and_no_others_than_the_top():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    drawn = choose(logits.expand(20000, -1), 0.5, None, generator).bincount(minlength=4) / 20000
    # A standard error of at most √(¼/20000) = .0035.
    torch.testing.assert_close(drawn, (logits / 0.5).softmax(-1)[0], atol=4 * 0.0035, rtol=0)
    top = choose(logits.expand(2000, -1), 5.0, 2, generator).bincount(minlength=4)
    assert (top[:2] > 500).all()
    assert (top[2:] == 0).all()


def test_learned_positions_end_where_their_table_does():
    config = ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8, positions="learned")
    model, tokens = born(config, 0).eval(), torch.tensor([[1, 2, 3]])
    assert len(list(generate(model, tokens, 6, temperature=0))) == 6
    with pytest.raises(UsageError, match="at most 6 tokens"):
        next(generate(model, tokens, 7, temperature=0))
