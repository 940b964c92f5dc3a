"""Weighted sums over the rows of a matrix, in numpy: reference and fallback."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F32, F64

TILE = 2**14
LEAST_EXPONENT = -900  # keeps 2^s finite; far below the smallest float32


def fast(matrix: F32, weights: F64, out: F32) -> bool:
    """Sum row by row in float64; return whether the result is finite."""
    for first in range(0, out.size, TILE):
        part = matrix[:, first : first + TILE]
        total = np.zeros(part.shape[1], np.float64)
        with np.errstate(invalid="ignore"):
            for row, weight in zip(part, weights, strict=True):
                total += weight * row.astype(np.float64)
        if not np.isfinite(total).all():
            return False
        out[first : first + TILE] = total
    return True


def exact(matrix: F32, weights: F64, room: int, out: F32) -> None:
    """Sum each column in fixed point: integers below 2^room in magnitude, whose sum does not depend on their order."""
    for first in range(0, out.size, TILE):
        part = matrix[:, first : first + TILE]
        top = np.zeros(part.shape[1], np.float64)
        for row, weight in zip(part, weights, strict=True):
            np.maximum(top, np.abs(weight * row.astype(np.float64)), out=top)
        scale = np.ldexp(1.0, room - np.maximum(np.frexp(top)[1], LEAST_EXPONENT))
        total = np.zeros(part.shape[1], np.int64)
        for row, weight in zip(part, weights, strict=True):
            total += np.rint(weight * row.astype(np.float64) * scale).astype(np.int64)
        out[first : first + TILE] = total.astype(np.float64) / scale
