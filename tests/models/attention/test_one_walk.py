"""The kernels of output, log-sum-exp and Σa² in one walk, under Triton's interpreter on a CPU: against autograd through
the whole matrix in float64.

On a GPU ``test_backends.py`` runs the kernels.
"""

import pytest
import torch

from birthmark import kernel_devices
from birthmark.models.attention import aggregation
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.document_mask import Documents
from birthmark.models.attention.fused import kernels, one_walk
from birthmark.models.attention.positions import POSITIONS, Placement
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("small_tiles")]


def whole(q, k, v, scale, first, others):
    """Output, log-sum-exp over all keys, Σa² over tokens, from the whole matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    query, key = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None], torch.arange(k.shape[2])
    seen = key <= query
    if first is not None:
        seen = seen & (key >= first[:, None, :, None])
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    total = scores.logsumexp(-1) if others is None else torch.logaddexp(scores.logsumexp(-1), others)
    weights = (scores - total[..., None]).exp()
    return weights @ v, total, weights.square().sum(-1)


#: Queries, keys, channels of keys and of values, the first keys of queries, keys without a value, the type.
CASES = {
    "ragged": (41, 41, 32, 32, None, False, torch.float32),
    "narrow values, documents, a sink": (41, 41, 40, 24, (0, 17), True, torch.float32),
    "the last queries, a window": (20, 49, 16, 16, 9, True, torch.float32),
    "each token by itself": (40, 40, 16, 16, 1, False, torch.float32),
    "one query": (1, 40, 16, 16, None, False, torch.float32),
    "bf16": (41, 41, 64, 64, (0, 17), True, torch.bfloat16),
    "fp16": (33, 33, 16, 16, None, False, torch.float16),
}


def assert_gradients(found, wanted, upstream, chosen, tolerance):
    """Compare gradients of some results, each with its leaves, with those in float64."""
    got, exact = (
        torch.autograd.grad(
            [x[i] for i in chosen], of, [upstream[i].to(x[i].dtype) for i in chosen], retain_graph=True,
            allow_unused=True,
        )
        for x, of in (found, wanted)
    )  # fmt: skip
    for g, e in zip(got, exact, strict=True):
        e = torch.zeros_like(g, dtype=torch.float64) if e is None else e
        assert float((g.double() - e).norm()) <= tolerance * float(e.norm()) + 1e-5, chosen


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_whole_matrix(name):
    n_queries, n_keys, width, of_values, limits, sink, dtype = CASES[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_queries, 4, width), (n_keys, 2, width), (n_keys, 2, of_values)]
    # The heads of a position lie side by side, as projections leave them.
    leaves = [torch.randn(2, *shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    if sink:
        leaves.append(torch.randn(2, 4, n_queries, generator=generator))
    first, query = None, torch.arange(n_keys - n_queries, n_keys)
    if isinstance(limits, tuple):
        first = torch.stack([query // (n_queries - limit) * (n_queries - limit) for limit in limits]).int()
    elif limits is not None:
        first = (query - limits + 1).clamp_min(0)[None].int()
    leaves = [x.requires_grad_() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found = one_walk.walk(*leaves[:3], 0.3, first, leaves[3] if sink else None)
    wanted = whole(*wide[:3], 0.3, first, wide[3] if sink else None)
    low = dtype != torch.float32
    for got, exact, loose in zip(found, wanted, (low, False, False), strict=True):
        tolerance = 1e-2 if loose else 2e-6
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
    # The kernels leave out what has no gradient.
    for chosen in ((0,), (1,), (2,), (0, 1, 2)) if name == "ragged" else ((0, 1, 2),):
        assert_gradients((found, leaves), (wanted, wide), upstream, chosen, 8e-3 if low else 3e-6)


@pytest.mark.parametrize("shape_of_rho", [None, (4, 1), (2, 4, 41)], ids=str)
@pytest.mark.parametrize("inverse", [None, 1 / 32])
@pytest.mark.parametrize("learns", [True, False])
def test_an_output_is_calibrated_as_it_is_written(shape_of_rho, inverse, learns):
    """With documents, so that Σa² lies on both sides of the smallest that counts."""
    generator, smallest = torch.Generator().manual_seed(0), 0.1
    leaves = [torch.randn(2, n, 41, 16, generator=generator) for n in (4, 2, 2)]
    if shape_of_rho is not None:
        leaves.append(0.1 + 0.8 * torch.rand(shape_of_rho, generator=generator))
    first = (torch.arange(41) // 17 * 17)[None].int()
    leaves = [x.requires_grad_() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, total, squares = whole(*wide[:3], 0.1, first, None)
    assert 0.2 < float((squares < smallest).double().mean()) < 0.8
    variance, reference = squares.clamp_min(smallest), 1.0 if inverse is None else inverse
    if shape_of_rho is not None:
        variance = wide[3] + (1 - wide[3]) * variance
        reference = 1.0 if inverse is None else wide[3] + (1 - wide[3]) * inverse
    factor = (reference / variance).sqrt()
    wanted = out * (factor if learns else factor.detach())[..., None], total, squares
    rho = None if shape_of_rho is None else leaves[3]
    calibration = one_walk.Calibration(rho, smallest, inverse, learns)
    found = one_walk.walk(*leaves[:3], 0.1, first, calibration=calibration)
    upstream = [torch.randn(x.shape, generator=generator) for x in found]
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=3e-6)
    for chosen in ((0,), (0, 1, 2)):
        assert_gradients((found, leaves), (wanted, wide), upstream, chosen, 3e-6)


def test_scores_of_thousands_overflow_nothing_and_nan_stays_in_its_row():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(3))
    leaves = [x.requires_grad_() for x in (300 * q, 10 * k, v)]
    found = one_walk.walk(*leaves, 1.0)
    assert float(found[1].detach().max()) > 1e3
    gradients = torch.autograd.grad(sum(x.sum() for x in found), leaves)
    assert all(bool(x.isfinite().all()) for x in (*found, *gradients))
    q[0, 1, 33, 3] = torch.nan
    for x in (one_walk.walk(q, k, v, 1.0)[0].sum(-1), *one_walk.walk(q, k, v, 1.0)[1:]):
        assert torch.nonzero(x.isnan()).tolist() == [[0, 1, 33]]


ARMS = {
    "exact": {},
    "estimated ρ, documents": {"calibration": {"correlation": "estimated"}, "documents": True},
    "learned ρ": {"calibration": {"correlation": "learned", "direction": "attenuate"}},
    "factors without a gradient": {"calibration": {"gradient": False}},
    "a value for all": {"kv_bias": "value"},
    "a window and a learned sink": {"window": 9, "normaliser": "softmax_sink"},
    "a learned key and value": {"kv_bias": "key_value", "calibration": {"direction": "attenuate"}},
    "alibi": {},
}


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_is_the_same_with_its_squares_from_one_walk(name, monkeypatch):
    """One attention, its output and all gradients: against the same in float64 with squares from a second one."""
    fields = {**ARMS[name]}
    given = fields.pop("calibration", {})
    results = []
    for squares in ("separate", "joint"):
        calibration = CalibrationConfig(**given, squares=squares)
        attention = AttentionConfig("calibrated", calibration=calibration, **fields)
        positions = "alibi" if name == "alibi" else "rope"
        shape = {"d_model": 32, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 40, "positions": positions}
        config = ModelConfig(**shape, attention=attention)
        module, generator = Attention(config, 0).train(), torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        x, upstream = (torch.randn(1, 40, 32, generator=generator) for _ in range(2))
        documents = Documents.of(torch.arange(40)[None] // 15) if attention.documents else None
        place: Placement = POSITIONS[positions](config).place(40, x.device, documents=documents)
        if squares == "joint":
            monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
            monkeypatch.setattr(kernels, "backend_for", lambda *_: pytest.fail("another attention runs"))
            if not {"normaliser", "kv_bias"} & set(fields):
                monkeypatch.setattr(aggregation, "scaled", lambda *_: pytest.fail("the output is read again"))
        else:
            module, x, upstream = module.double(), x.double(), upstream.double()
        x = x.requires_grad_()
        out = module(x, place)
        results.append([out, *torch.autograd.grad(out, [x, *module.parameters()], upstream)])
    for wanted, got in zip(*results, strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-5
