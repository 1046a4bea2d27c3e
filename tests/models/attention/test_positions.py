"""ALiBi's slopes against the paper's own code, and to the bit against numbers of Python's; T5's buckets."""

import math

import pytest
import torch

from birthmark.models.attention.positions import AlibiPositions, T5Positions
from birthmark.models.config import ModelConfig


def papers_slopes(n):
    """``get_slopes`` of github.com/ofirpress/attention_with_linear_biases."""

    def of_power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return of_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_power_of_2(closest) + papers_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 20, 32, 71])
def test_alibis_slopes_are_the_papers(n_heads):
    config = ModelConfig(d_model=2 * n_heads, n_heads=n_heads, positions="alibi", vocab_size=24)
    slopes_H = AlibiPositions(config).place(5, torch.device("cpu")).slopes_H
    assert slopes_H.dtype == torch.float32
    torch.testing.assert_close(slopes_H.double(), torch.tensor(papers_slopes(n_heads)).double(), rtol=1e-6, atol=0)
    whole = 2 ** math.floor(math.log2(n_heads))
    steps = [8 / whole * i for i in range(1, whole + 1)] + [4 / whole * i for i in range(1, 2 * (n_heads - whole), 2)]
    assert torch.equal(slopes_H, torch.tensor([2.0**-step for step in steps]))


@pytest.mark.parametrize(("n_buckets", "longest"), [(32, 128), (8, 20), (2, 2)])
def test_t5_buckets_are_those_of_transformers(n_buckets, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    shape = {"d_model": 32, "n_heads": 4, "vocab_size": 61, "max_seq_len": 24}
    positions = T5Positions(ModelConfig(**shape, positions="t5", t5_buckets=n_buckets, t5_max_distance=longest))
    with torch.no_grad():
        positions.table.weight.copy_(torch.arange(n_buckets)[:, None].expand(-1, 4))
    bucket = T5Attention._relative_position_bucket(-torch.arange(300), False, n_buckets, longest)
    assert torch.equal(positions.place(300, torch.device("cpu")).bias_HS, bucket.float().expand(4, -1))
    late = positions.place(3, torch.device("cpu"), first=297)
    assert (late.first, late.bias_HS.shape) == (297, (4, 300))
