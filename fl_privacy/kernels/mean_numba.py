"""Weighted sums over the rows of a matrix, compiled. Bit-identical to the numpy twin: same order, no contraction."""

from __future__ import annotations

import math

import numpy as np

from fl_privacy.kernels.arrays import F32, F64, I64
from fl_privacy.kernels.jit import compiled

TILE = 4096  # pieces of each row that are long enough for hardware prefetching
LEAST_EXPONENT = -900  # keeps 2^s finite; far below the smallest float32


@compiled
def _add(row: F32, weight: float, total: F64) -> None:
    for c in range(row.size):
        total[c] += weight * np.float64(row[c])


@compiled
def _add_two(row: F32, weight: float, next_row: F32, next_weight: float, total: F64) -> None:
    """Two rows in one pass over the sums: half the loads and stores, the same order of additions."""
    for c in range(row.size):
        total[c] = (total[c] + weight * np.float64(row[c])) + next_weight * np.float64(next_row[c])


@compiled
def _round(total: F64, out: F32) -> bool:
    """Round to float32 and return whether all are finite (a sum with a NaN or an infinity stays non-finite)."""
    broken = np.uint32(0)
    for c in range(out.size):
        out[c] = np.float32(total[c])
        broken |= np.uint32(not abs(total[c]) < np.inf)
    return bool(broken == 0)


@compiled
def fast(matrix: F32, weights: F64, out: F32) -> bool:
    """Sum row by row in float64; return whether the result is finite."""
    total = np.empty(TILE, np.float64)
    finite = True
    for first in range(0, out.size, TILE):
        last = min(first + TILE, out.size)
        part = total[: last - first]
        part[:] = 0.0
        pairs = weights.size // 2
        for k in range(0, 2 * pairs, 2):
            _add_two(matrix[k, first:last], weights[k], matrix[k + 1, first:last], weights[k + 1], part)
        for k in range(2 * pairs, weights.size):
            _add(matrix[k, first:last], weights[k], part)
        finite &= _round(part, out[first:last])
    return finite


@compiled
def _raise(row: F32, weight: float, top: F64) -> None:
    for c in range(row.size):
        top[c] = max(top[c], abs(weight * np.float64(row[c])))


@compiled
def _add_fixed(row: F32, weight: float, scale: F64, total: I64) -> None:
    for c in range(row.size):
        total[c] += np.int64(np.rint(weight * np.float64(row[c]) * scale[c]))


@compiled
def exact(matrix: F32, weights: F64, room: int, out: F32) -> None:
    """Sum each column in fixed point: integers below 2^room in magnitude, whose sum does not depend on their order."""
    top = np.empty(TILE, np.float64)
    scale = np.empty(TILE, np.float64)
    total = np.empty(TILE, np.int64)
    for first in range(0, out.size, TILE):
        last = min(first + TILE, out.size)
        width = last - first
        top[:width] = 0.0
        total[:width] = 0
        for k in range(weights.size):
            _raise(matrix[k, first:last], weights[k], top[:width])
        for c in range(width):
            exponent = max(math.frexp(top[c])[1], LEAST_EXPONENT)
            scale[c] = math.ldexp(1.0, room - exponent)
        for k in range(weights.size):
            _add_fixed(matrix[k, first:last], weights[k], scale[:width], total[:width])
        for c in range(width):
            out[first + c] = np.float32(np.float64(total[c]) / scale[c])
