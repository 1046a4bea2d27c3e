"""GPU kernels of the eigenvalues of a symmetric matrix in float64, with one program for one matrix: a candidate for the
ranks of snapshots, once a card has timed it beside the library's solver.

A library spreads each of the n dependent steps of a matrix over the whole GPU, and steps of several matrices take
turns. A program that does all steps of a matrix holds one multiprocessor, and leaves the others to the model's pass.

Householder reflections make the matrix tridiagonal (Golub & Van Loan, Matrix Computations, §8.3.1). A step's update of
the rest, ``A − v wᵀ − w vᵀ``, waits for the next step, which reads the rest in any case for its product with the next
``v``: each step reads and writes it once. Bisection by Sturm sequences then finds all eigenvalues side by side (Barth,
Martin & Wilkinson, Numerische Mathematik 9, 1967).

Triton reads the annotations of its functions: only constants have one.

Legend: N width, rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Rows and columns of a tile, and warps of the program that reduces a matrix.
_ROWS, _COLUMNS, _WARPS = 32, 128, 16
#: Eigenvalues of a program of the bisection, and its warps.
_VALUES, _VALUE_WARPS = 64, 2
#: Halvings of the interval that holds all eigenvalues: its width times 2⁻⁵⁸ is below the rounding of float64.
_HALVINGS = 58
#: Smallest pivot of a Sturm sequence of a matrix whose largest entry is 1.
_PIVOT = tl.constexpr(1e-290)


@triton.jit
def _tridiagonal(  # type: ignore[no-untyped-def]
    matrix, vectors, diagonal, beside, n, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reduce one symmetric matrix, which is overwritten; ``vectors [4, N]`` hold zeros."""
    last_v, last_w, next_v, product = vectors, vectors + N, vectors + 2 * N, vectors + 3 * N
    column = tl.arange(0, N)
    within = column < n
    for step in range(n):
        # The step's row, with the update that waits.
        v, w = tl.load(last_v + column), tl.load(last_w + column)
        row = tl.load(matrix + step * n + column, mask=within & (column >= step), other=0.0)
        row -= v * tl.load(last_w + step) + w * tl.load(last_v + step)
        tl.store(diagonal + step, tl.sum(tl.where(column == step, row, 0.0), 0))
        tail = tl.where(within & (column > step), row, 0.0)
        first = tl.sum(tl.where(column == step + 1, tail, 0.0), 0)
        rest = tl.sum(tl.where(column == step + 1, 0.0, tail * tail), 0)
        norm = tl.sqrt(first * first + rest)
        pivot = tl.where(rest > 0, tl.where(first > 0, -norm, norm), first)
        tl.store(beside + step, pivot)
        # With nothing left to eliminate, v is 0.
        v = tl.where(rest > 0, tail - tl.where(column == step + 1, pivot, 0.0), 0.0)
        factor = tl.where(rest > 0, 1.0 / tl.where(rest > 0, norm * (norm + tl.abs(first)), 1.0), 0.0)
        tl.store(next_v + column, v)
        tl.debug_barrier()
        for top in range((step + 1) // ROWS * ROWS, n, ROWS):
            i = top + tl.arange(0, ROWS)
            v_i, w_i = tl.load(last_v + i), tl.load(last_w + i)
            sums = tl.zeros([ROWS, COLUMNS], tl.float64)
            for left in range((step + 1) // COLUMNS * COLUMNS, n, COLUMNS):
                j = left + tl.arange(0, COLUMNS)
                inside = ((i > step) & (i < n))[:, None] & ((j > step) & (j < n))[None, :]
                at = matrix + i[:, None] * n + j[None, :]
                tile = tl.load(at, mask=inside, other=0.0)
                tile -= v_i[:, None] * tl.load(last_w + j)[None, :] + w_i[:, None] * tl.load(last_v + j)[None, :]
                tl.store(at, tile, mask=inside)
                sums += tl.where(inside, tile, 0.0) * tl.load(next_v + j)[None, :]
            tl.store(product + i, tl.sum(sums, 1))
        tl.debug_barrier()
        p = tl.where(within & (column > step), tl.load(product + column), 0.0) * factor
        tl.store(last_v + column, v)
        tl.store(last_w + column, p - v * (factor * tl.sum(p * v, 0) / 2))
        tl.debug_barrier()


@triton.jit
def _bisect(  # type: ignore[no-untyped-def]
    diagonal, squares, bounds, values, n, n_halvings, M: tl.constexpr,
):  # fmt: skip
    """Find some eigenvalues, by their rank, of a tridiagonal matrix."""
    rank = tl.program_id(0) * M + tl.arange(0, M)
    low, high = tl.zeros([M], tl.float64) + tl.load(bounds), tl.zeros([M], tl.float64) + tl.load(bounds + 1)
    for _ in range(n_halvings):
        middle = (low + high) / 2
        n_below, pivot = tl.zeros([M], tl.int32), tl.full([M], 1.0, tl.float64)
        for i in range(n):
            pivot = tl.load(diagonal + i) - middle - tl.load(squares + i) / pivot
            pivot = tl.where(tl.abs(pivot) < _PIVOT, -_PIVOT, pivot)
            n_below += (pivot < 0).to(tl.int32)
        high = tl.where(n_below > rank, middle, high)
        low = tl.where(n_below > rank, low, middle)
    tl.store(values + rank, (low + high) / 2, mask=rank < n)


def eigenvalues(upper_DD: Tensor) -> Tensor:
    """Return the eigenvalues ``[D]``, rising, of the finite symmetric float64 matrix whose upper half is given.

    Their errors are a few roundings of the largest one, as those of other solvers of whole matrices.
    """
    n, width = len(upper_DD), max(triton.next_power_of_2(len(upper_DD)), _COLUMNS)
    upper_DD = upper_DD.triu()
    scale = upper_DD.abs().amax()
    scale = scale.masked_fill(scale == 0, 1.0)
    matrix_DD = (upper_DD + upper_DD.triu(1).mT) / scale
    diagonal_D, beside_D, found_D = upper_DD.new_zeros(3, n)
    with torch.cuda.device_of(upper_DD):
        _tridiagonal[(1,)](
            matrix_DD, upper_DD.new_zeros(4, width), diagonal_D, beside_D, n, N=width, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )  # fmt: skip
        # Entry i is that between i − 1 and i; none lies before the first.
        beside_D = beside_D.roll(1)
        beside_D[0] = 0
        around_D = beside_D.abs() + beside_D.abs().roll(-1)
        bounds = torch.stack([(diagonal_D - around_D).amin(), (diagonal_D + around_D).amax()])
        _bisect[(triton.cdiv(n, _VALUES),)](
            diagonal_D, beside_D.square(), bounds, found_D, n, _HALVINGS, M=_VALUES, num_warps=_VALUE_WARPS
        )
    return found_D * scale
