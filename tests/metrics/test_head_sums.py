"""Sums over queries and outputs of heads, against formulas in float64; by torch's operators and by kernels."""

import pytest
import torch
import triton_kernels

from birthmark.metrics import head_sums
from birthmark.metrics.head_sums import deviations, query_sums


def heads(shape, dtype, seed, device="cpu"):
    """Rows that do not follow one another, as a projection of queries, keys and values gives them."""
    n_sequences, n_heads, length, width = shape
    x = torch.randn(n_sequences, length, 3, n_heads, width + 4, generator=torch.Generator().manual_seed(seed))
    return (x + 0.5).to(dtype).to(device)[:, :, 1, :, :width].transpose(1, 2)


def check(shape, dtype, device, tolerance):
    def close(found, wanted):
        atol = tolerance * float(wanted.abs().amax())
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=atol)

    q_BHTK, k_BHTK = heads(shape, dtype, 0, device), heads(shape, dtype, 1, device)
    first_BHK, total_HK, moment_HKK, dots_BTH = query_sums(q_BHTK, k_BHTK)
    q = q_BHTK.double()
    assert torch.equal(first_BHK, k_BHTK[:, :, 0].to(first_BHK.dtype))
    close(total_HK, q.sum((0, 2)))
    close(moment_HKK, torch.einsum("bhtk,bhtj->hkj", q, q))
    close(dots_BTH, torch.einsum("bhtk,bhk->bth", q, first_BHK.double()))
    mean_THK = torch.randn(shape[2], shape[1], shape[3]).to(device, torch.promote_types(dtype, torch.float32))
    norm_BTH, away_THK = deviations(q_BHTK, mean_THK)
    away_BTHK = q.transpose(1, 2) - mean_THK.double()
    close(norm_BTH, away_BTHK.square().sum(-1).sqrt())
    close(away_THK, away_BTHK.sum(0))
    assert norm_BTH.dtype == away_THK.dtype == mean_THK.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torchs_operators_give_the_formulas(dtype):
    check((3, 2, 7, 5), dtype, "cpu", 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("device", triton_kernels.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# Several parts of a sum, heads that fill no block, and sequences that are divided.
@pytest.mark.parametrize("shape", [(3, 2, 700, 64), (40, 3, 9, 80), (2, 5, 33, 8), (1, 1, 1, 128)], ids=str)
def test_the_kernels_give_the_formulas(device, dtype, shape, monkeypatch):
    called = []
    monkeypatch.setattr(head_sums, "fuses_rows", lambda x: called.append(x) or True)
    check(shape, dtype, device, 3e-6)
    assert len(called) == 2
