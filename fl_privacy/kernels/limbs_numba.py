"""Exact sums of float32 columns as integers of several limbs, compiled. The same integers as the numpy twin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_privacy.kernels.arrays import F32, I64
from fl_privacy.kernels.jit import compiled

BITS, LIMBS, LOWEST = 40, 7, -149  # limb j counts multiples of 2^(LOWEST + BITS j): together, every float32


@compiled
def _add(row: NDArray[np.int32], total: I64) -> None:
    for c in range(row.size):
        bits = np.int64(row[c])
        exponent = (bits >> 23) & 255
        mantissa = bits & 0x7FFFFF
        if exponent > 0:
            mantissa |= 0x800000
            exponent -= 1
        limb, offset = exponent // BITS, exponent % BITS
        low = (mantissa & ((1 << (BITS - offset)) - 1)) << offset
        high = mantissa >> (BITS - offset)
        if bits < 0:
            low, high = -low, -high
        total[limb, c] += low
        if high != 0:
            total[limb + 1, c] += high


def add(matrix: F32, total: I64) -> None:
    """Add every row to `total`, of shape (LIMBS, columns); a limb gets less than 2^BITS in magnitude from each row."""
    for row in matrix:
        _add(np.ascontiguousarray(row).view(np.int32), total)
