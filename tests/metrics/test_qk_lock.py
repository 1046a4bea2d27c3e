"""QK lock against cosines and dot products of all queries and keys at once (definitions §7)."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.metrics import qk_lock
from birthmark.metrics.head_sums import query_sums
from birthmark.metrics.qk_lock import QKLock, first_directions


def pair(n=8, h=2, length=6, k=4, seed=0, dtype=torch.float64):
    """Queries with a direction of their own, and keys."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(n, h, length, k)) + 3 * rng.normal(size=(h, 1, k))
    return torch.from_numpy(q).to(dtype), torch.from_numpy(rng.normal(size=(n, h, length, k))).to(dtype)


def measured(layers, splits=()):
    _, h, _, k = layers[0][0].shape
    metric = QKLock(len(layers), h, k)
    for layer, (q, keys) in enumerate(layers):
        parts = (torch.tensor_split(x, list(splits)) for x in (q, keys))
        for part in zip(*parts, strict=True):
            metric.update(layer, query_sums(*part))
    return metric.compute()


def explicit(q, k):
    q, k0 = q.double().numpy(), k[:, :, 0].double().numpy()
    found = []
    for head in range(q.shape[1]):
        flat = q[:, head].reshape(-1, q.shape[-1])
        u = np.linalg.svd(flat)[2][0]
        u = u * (1 if flat.mean(0) @ u >= 0 else -1)
        cosines = k0[:, head] @ u / np.linalg.norm(k0[:, head], axis=-1)
        positive = np.mean([(q[n, head, 1:] @ k0[n, head] > 0).mean() for n in range(len(q))])
        found.append((np.sqrt((cosines**2).mean()), cosines.mean(), positive))
    return np.array(found).T


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(2, 8), st.integers(1, 5)),
    st.integers(0, 99),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_every_quantity_is_that_of_all_queries_at_once(shape, seed, dtype):
    layers = [pair(*shape, seed=seed + i, dtype=dtype) for i in range(2)]
    result = measured(layers)
    assert result.cosine.shape == result.signed.shape == result.positive.shape == (2, shape[1])
    for layer, (q, k) in enumerate(layers):
        for value, expected in zip(result, explicit(q, k), strict=True):
            np.testing.assert_allclose(value[layer], expected, atol=1e-9 if dtype == torch.float64 else 1e-4)


def test_keys_of_zeros_attract_nothing():
    q, k = pair()
    result = measured([(q, 0 * k)])
    assert all((value == 0).all() for value in result)


def test_a_single_position_has_no_later_queries():
    result = measured([pair(length=1)])
    assert np.isnan(result.positive).all()
    assert np.isfinite(result.cosine).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(2, 24), st.floats(-12, 12), st.floats(-7, 0), st.integers(0, 99))
def test_the_first_direction_is_that_of_eigh(n, width, scale, gap, seed):
    """Of matrices of any size, and with a largest eigenvalue that stands out by little."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(n, width, width)))[0]
    values = rng.uniform(size=(n, width))
    values[:, 0] = 1 + 10**gap
    moments = 10**scale * (axes * values[:, None]) @ axes.swapaxes(1, 2)
    # Only the lower half is read, as by eigh.
    found = first_directions(torch.from_numpy(moments + np.triu(rng.normal(size=moments.shape), 1))).numpy()
    expected = np.linalg.eigh(moments)[1][..., -1]
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, rtol=1e-14)
    sides = np.sign((found * expected).sum(-1))
    np.testing.assert_allclose(sides[:, None] * found, expected, atol=1e-13 * 10**-gap)


def test_first_directions_without_one_are_unit_vectors():
    moments = torch.stack([torch.eye(3), torch.zeros(3, 3)])
    found = first_directions(moments)
    assert found.norm(dim=-1).allclose(torch.ones(2, dtype=torch.float64))
    assert found[1].tolist() == [0, 0, 1]
    assert first_directions(torch.tensor([[[5.0]]])).item() == 1


def test_parts_of_the_matrices_give_what_all_of_them_give(monkeypatch):
    x = torch.randn(7, 9, 5, dtype=torch.float64)
    moments = x.mT @ x
    whole = first_directions(moments)
    monkeypatch.setattr(qk_lock, "_CACHED", 2 * 25)
    np.testing.assert_allclose(first_directions(moments), whole, atol=1e-13)
