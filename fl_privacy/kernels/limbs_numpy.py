"""Exact sums of float32 columns as integers of several limbs, in numpy: reference and fallback."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F32, I64

TILE = 2**14
BITS, LIMBS, LOWEST = 40, 7, -149  # limb j counts multiples of 2^(LOWEST + BITS j): together, every float32


def add(matrix: F32, total: I64) -> None:
    """Add every row to `total`, of shape (LIMBS, columns); a limb gets less than 2^BITS in magnitude from each row."""
    for first in range(0, matrix.shape[1], TILE):
        part = matrix[:, first : first + TILE]
        place = np.arange(part.shape[1])
        own = np.zeros((LIMBS + 1) * place.size, np.int64)
        for row in part:
            bits = np.ascontiguousarray(row).view(np.int32).astype(np.int64)
            exponent = (bits >> 23) & 255
            mantissa = (bits & 0x7FFFFF) | ((exponent > 0).astype(np.int64) << 23)
            limb, offset = np.divmod(np.maximum(exponent, 1) - 1, BITS)
            where, sign = limb * place.size + place, 1 - 2 * (bits < 0).astype(np.int64)
            own[where] += sign * ((mantissa & ((1 << (BITS - offset)) - 1)) << offset)
            own[where + place.size] += sign * (mantissa >> (BITS - offset))
        total[:, first : first + TILE] += own.reshape(LIMBS + 1, -1)[:LIMBS]
