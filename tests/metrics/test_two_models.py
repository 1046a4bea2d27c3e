"""Two models beside each other: unbiased CKA against the slow formula, and divergence of predictions."""

from itertools import permutations

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.nn import functional as F

from birthmark.metrics.two_models import cka, gram_vector, hsic, loss_barrier, minibatches, token_kl, token_loss


def vectors(x_ND, sizes):
    """Of one place."""
    return [gram_vector(part)[None].numpy() for part in torch.as_tensor(x_ND).split(sizes)]


def similarity(x_ND, y_ND, sizes):
    a, b = vectors(x_ND, sizes), vectors(y_ND, sizes)
    return cka(hsic(a, b), hsic(a, a).diagonal(), hsic(b, b).diagonal())


@pytest.fixture(scope="module")
def published_inputs():
    """Those of google-research's representation_similarity/Demo.ipynb, which prints 0.51346 for them."""
    numbers = np.random.RandomState(1337)
    x_ND = numbers.randn(100, 10)
    return x_ND, numbers.randn(100, 10) + x_ND


#: Of the same inputs, in float64: ``cka(gram_linear(X), gram_linear(Y), debiased=True)`` of that notebook; and the
#: minibatch estimate of AntixK/PyTorch-Model-Compare (torch_cka/cka.py, its ``_HSIC`` averaged over batches of 25).
PUBLISHED = {(100,): 0.513456489505526, (25, 25, 25, 25): 0.5132675063590595}


@pytest.mark.parametrize("sizes", PUBLISHED)
def test_it_gives_what_published_implementations_give(published_inputs, sizes):
    assert similarity(*published_inputs, list(sizes)) == pytest.approx(PUBLISHED[sizes], abs=1e-9)


def of_all_tuples(k_NN, l_NN):
    """The unbiased estimate as sums over different examples (Song et al. 2012, from its definition)."""
    n = range(len(k_NN))
    twos, threes, fours = (list(permutations(n, size)) for size in (2, 3, 4))
    same = np.mean([k_NN[i, j] * l_NN[i, j] for i, j in twos])
    apart = np.mean([k_NN[i, j] * l_NN[q, r] for i, j, q, r in fours])
    mixed = np.mean([k_NN[i, j] * l_NN[i, q] for i, j, q in threes])
    return same + apart - 2 * mixed


def test_hsic_is_the_mean_over_all_tuples_of_different_examples():
    numbers = np.random.default_rng(0)
    x_ND, y_ND = numbers.normal(size=(7, 3)) + 5, numbers.normal(size=(7, 2))
    expected = of_all_tuples(x_ND @ x_ND.T, y_ND @ y_ND.T)
    assert hsic(vectors(x_ND, [7]), vectors(y_ND, [7])) == pytest.approx(expected, abs=1e-12)


def test_a_large_shift_of_all_features_costs_no_digits():
    x_ND = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gram_vector(x_ND + 1e6), gram_vector(x_ND), atol=1e-7, rtol=0)


def test_what_turns_or_scales_is_the_same_and_what_is_constant_is_no_number():
    x_ND = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned_ND = 3 * x_ND @ torch.linalg.qr(x_ND[:4]).Q
    assert similarity(x_ND, turned_ND, [6, 6]) == pytest.approx(1, abs=1e-12)
    assert np.isnan(similarity(x_ND, torch.ones(12, 2), [6, 6])).all()


def test_minibatches_share_the_examples_evenly():
    assert minibatches(13, 5) == [5, 4, 4]
    assert minibatches(256, 256) == [256]
    with pytest.raises(ValueError, match="would have 3 examples, and needs 4"):
        minibatches(10, 4)


# ---------------------------------------------------------------- test token divergence
# Divergence and loss of predictions, and the barrier, against scipy and torch.


def test_kl_is_scipys_of_every_ordered_pair():
    logits = [5 * torch.randn(4, 9, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = token_kl(logits)
    for a in range(3):
        for b in range(3):
            p, q = (scipy.special.softmax(logits[i].double().numpy(), axis=1) for i in (a, b))
            expected = torch.from_numpy(scipy.stats.entropy(p, q, axis=1))
            torch.testing.assert_close(found[:, a, b], expected, atol=1e-12, rtol=1e-9)


def test_loss_is_torchs():
    logits, targets = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 6, 3, 3, 1])
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(token_loss(logits, targets), expected)


def test_a_barrier_rises_above_the_line_between_the_ends():
    assert loss_barrier([0, 0.25, 0.5, 1], [1.0, 2.0, 2.5, 3.0]) == pytest.approx((0.5, 0.25))
    assert loss_barrier([0, 0.5, 1], [3.0, 1.0, 2.0]) == (0, 0)
