"""Eigenvalues by one program for one matrix, against LAPACK."""

import numpy as np
import pytest
import torch
from triton_kernels import DEVICES, IS_INTERPRETED

#: Widths that end within a tile, with one, and behind several.
_DRAWN = {f"width {n}": n for n in (1, 2, 8, 21)}


def _matrix(name):
    if name in _DRAWN:
        n = _DRAWN[name]
        # Channels a thousandfold apart, as those of hidden states.
        x = torch.randn(4 * n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        x *= torch.logspace(0, -3, n, dtype=torch.float64)
        return x.T @ x
    return {
        "zeros": torch.zeros(5, 5),
        "a multiple eigenvalue": torch.ones(9, 9),
        "a diagonal, unsorted": torch.diag(torch.tensor([3.0, -1.0, 2.0, 0.0, 2.0])),
        "no reflection in the middle": torch.block_diag(torch.ones(3, 3), torch.full((1, 1), 4.0), torch.ones(4, 4)),
        "negative ones": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        "tiny": torch.ones(4, 4, dtype=torch.float64) * 1e-200,
        "huge": torch.ones(4, 4, dtype=torch.float64) * 1e200,
    }[name].double()


_SPECIAL = ["zeros", "a multiple eigenvalue", "a diagonal, unsorted", "no reflection in the middle", "negative ones"]


@pytest.mark.parametrize("name", [*_DRAWN, *_SPECIAL, "tiny", "huge"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_program_finds_the_eigenvalues_of_a_matrix(name, device, monkeypatch):
    from gpu_run import eigenvalues_kernel

    if IS_INTERPRETED:
        monkeypatch.setattr(eigenvalues_kernel, "_ROWS", 4)
        monkeypatch.setattr(eigenvalues_kernel, "_COLUMNS", 8)
        monkeypatch.setattr(eigenvalues_kernel, "_VALUES", 16)
    matrix = _matrix(name)
    # The part below the diagonal is not read.
    given = torch.where(torch.ones_like(matrix).triu() > 0, matrix, 7.0).to(device)
    found = eigenvalues_kernel.eigenvalues(given).cpu().numpy()
    wanted = np.linalg.eigvalsh(matrix.numpy())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14 * abs(wanted).max())
    assert (np.diff(found) >= 0).all()
