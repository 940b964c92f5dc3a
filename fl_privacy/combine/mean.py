"""Weighted means of updates: a fast one, and one whose bits do not depend on the order of the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.combine import limbs
from fl_privacy.errors import FederationError
from fl_privacy.vector import Vector

MAX_ROWS = 2**20
Shares = Sequence[float] | NDArray[np.floating] | None


def weighted(
    matrix: NDArray[np.float32], weights: Shares = None, exact: bool = False, *, backend: str | None = None
) -> Vector:
    """The mean of the rows, weights normalised to sum 1 (equal if none are given).

    Fast: summed in float64 in the order of the rows.

    Exact: the same bits for every order of the (row, weight) pairs, and on a shard as on the whole vector. With equal
    weights it is made of the exact sum (`fl_privacy.combine.limbs`), so sums of some rows each give these bits, too.
    Otherwise each product w x is rounded to a multiple of 2^-s, with s of the column the largest for which n such
    integers cannot overflow 63 bits. With M the column's largest |w x| and n < 2^b rows, the multiples are of at most
    M 2^(b - 61), so the error of the sum is at most n M 2^(b - 62) <= n^2 M 2^-61: 2^8 times less than the fast sum's
    worst case. In addition, only the products (n M 2^-53) and the result (to float32) are rounded.
    """
    check_matrix(matrix)
    shares = normalised(weights, matrix.shape[0])
    kernel = kernels.pick("mean", matrix.size, backend)
    out = np.empty(matrix.shape[1], np.float32)
    if not kernel.fast(matrix, shares, out):
        raise FederationError("matrix: not finite; refuse updates with NaN or infinite values before combining them")
    if exact and (shares == shares[0]).all():
        return limbs.mean(limbs.summed(matrix, backend), matrix.shape[0])
    if exact:
        kernel.exact(matrix, shares, 62 - matrix.shape[0].bit_length(), out)
    return out


def normalised(weights: Shares, rows: int) -> NDArray[np.float64]:
    """Weights that sum to 1; their sum is exactly rounded, so it does not depend on their order."""
    given = np.ones(rows) if weights is None else np.asarray(weights, dtype=np.float64)
    if given.shape != (rows,):
        raise FederationError(f"weights: {given.size} given for {rows} rows; pass one per row")
    if not np.isfinite(given).all() or np.any(given < 0) or not np.any(given > 0):
        raise FederationError("weights: must be finite and not negative, and at least one must be positive")
    # Scaled to at most 1 first: a sum of large weights may overflow.
    scaled = given / given.max()
    shares: NDArray[np.float64] = scaled / math.fsum(scaled)
    return shares


def check_matrix(matrix: NDArray[np.float32]) -> None:
    if matrix.ndim != 2 or matrix.dtype != np.float32 or not matrix.flags.c_contiguous:
        raise FederationError(f"matrix: {matrix.dtype} of shape {matrix.shape} is not a contiguous float32 matrix")
    if not 1 <= matrix.shape[0] <= MAX_ROWS:
        raise FederationError(f"matrix: {matrix.shape[0]} rows, between 1 and {MAX_ROWS} needed")
