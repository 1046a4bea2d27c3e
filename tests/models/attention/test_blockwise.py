"""Explicit rows that are relatives of softmax, against their formulas a row at a time in float64."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from birthmark.models.attention.attention import NORMALISERS
from birthmark.models.attention.fused.blockwise import clipped_rows, softmax_with_lse_, softpick_rows
from birthmark.models.config import AttentionConfig, ModelConfig


@pytest.mark.parametrize("scale", [0.1, 1.0, 40.0])
def test_a_softmax_gives_its_log_sum_exp_as_exactly_as_it_is_known(scale):
    generator = torch.Generator().manual_seed(0)
    scores = scale * torch.randn(2, 64, 1000, generator=generator)
    scores[0, 3, 5:] = -torch.inf  # keys that are not seen
    scores[1, 2, 7] += 300.0  # a sink that has all
    weights = scores.clone()
    lse = softmax_with_lse_(weights)
    exact = logsumexp(scores.double().numpy(), axis=-1)
    # A few roundings of float32 at the size of the largest score.
    assert lse.numpy() == pytest.approx(exact, rel=3e-7, abs=1e-6)
    assert weights.numpy() == pytest.approx(np.exp(scores.double().numpy() - exact[..., None]), abs=5e-7)


def slow_softpick(s):
    excess = torch.tensor([torch.exp(x) - 1 for x in s])
    return excess.clamp_min(0) / (excess.abs().sum() + 1e-8)


def slow_clipped(s):
    p = torch.exp(s) / torch.exp(s).sum()
    return torch.stack([min(max(1.02 * x + 0.03 * x - 0.03, torch.zeros(())), torch.ones(())) for x in p])


@pytest.mark.parametrize(
    ("rows", "slow"),
    [(softpick_rows, slow_softpick), (lambda *given: clipped_rows(*given, zeta=1.02, gamma=-0.03), slow_clipped)],
    ids=["softpick", "clipped"],
)
def test_rows_are_those_of_the_formula(rows, slow):
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(1, 2, 5, 6, generator=generator, dtype=torch.float64)
    extra = [torch.randn(1, 2, 5, 1, generator=generator, dtype=torch.float64)]
    seen = torch.rand(5, 6, generator=generator) < 0.6
    seen[:, 0] = True
    weights, shares = rows(scores, seen, extra)
    assert not weights[..., ~seen].any()
    for h in range(2):
        for t in range(5):
            of_row = slow(torch.cat([scores[0, h, t, seen[t]], extra[0][0, h, t]]))
            torch.testing.assert_close(torch.cat([weights[0, h, t, seen[t]], shares[0][0, h, t]]), of_row)
    assert (weights.sum(-1) <= 1).all()

    def of_scores(scores, extra):
        return rows(scores, seen, [extra])[0]

    assert torch.autograd.gradcheck(of_scores, (scores.requires_grad_(), extra[0].requires_grad_()))


def test_scores_of_any_size_give_numbers():
    seen = torch.ones(1, 3, dtype=torch.bool)
    for scores, expected in (
        ([200.0, 100.0, -200.0], [1.0, 0.0, 0.0]),  # exp(200) is no float32
        ([-200.0, -300.0, -100.0], [0.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([100.0, 100.0, -1.0], [0.5, 0.5, 0.0]),
    ):
        row = torch.tensor([[[scores]]], requires_grad=True)
        weights = softpick_rows(row, seen, [])[0]
        torch.testing.assert_close(weights, torch.tensor([[[expected]]]))
        weights.square().sum().backward()
        assert row.grad.isfinite().all()


def test_the_published_stretch_is_the_default():
    """OPT-125M: α 12 at length 512."""
    config = ModelConfig(max_seq_len=512, attention=AttentionConfig(normaliser="softmax_clipped"))
    clipped = NORMALISERS["softmax_clipped"](config)
    assert (clipped.zeta, clipped.gamma) == (1.0, -12 / 512)
