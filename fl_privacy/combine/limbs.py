"""Exact sums of updates, and a mean that depends on nothing but such a sum and a count.

So the mean has the same bits however the sum was put together: in any order of the rows, and from sums of some of them.
A sum is an array of integers of shape (LIMBS, columns): limb j counts multiples of 2^(LOWEST + BITS j). No number has
two such forms.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.errors import FederationError, require
from fl_privacy.kernels.limbs_numpy import BITS, LIMBS, LOWEST
from fl_privacy.vector import Vector

Limbs = NDArray[np.int64]
HALF = 1 << (BITS - 1)
MOST = 1 << 62  # of the highest limb in magnitude
TILE = 2**16


def summed(matrix: NDArray[np.float32], backend: str | None = None) -> Limbs:
    """The sum of the rows, of which there are at most 2^20."""
    total = np.zeros((LIMBS, matrix.shape[1]), np.int64)
    kernels.pick("limbs", matrix.size, backend).add(matrix, total)
    return _carried(total)


def added(sums: Iterable[Limbs]) -> Limbs:
    """The sum of sums, of at most 2^20 rows in all."""
    return _carried(np.sum(list(sums), axis=0, dtype=np.int64))


def mean(total: Limbs, count: int) -> Vector:
    """The sum over the count in float64, then as float32: off by less than 2^-50 of it before the last rounding."""
    out = np.empty(total.shape[1], np.float32)
    for first in range(0, out.size, TILE):
        part = total[:, first : first + TILE]
        value = np.zeros(part.shape[1], np.float64)
        for limb in part[::-1]:
            value = value * 2.0**BITS + limb
        out[first : first + TILE] = value * 2.0**LOWEST / count
    return out


def packed(total: Limbs) -> Limbs:
    """As it travels: the index of the lowest limb that is not zero everywhere, then it and those up to the highest."""
    used = np.flatnonzero(total.any(axis=1))
    low, high = (int(used[0]), int(used[-1])) if used.size else (0, 0)
    return np.concatenate([np.array([low], np.int64), total[low : high + 1].reshape(-1)])


def longest(columns: int) -> int:
    """Numbers in a sum as it travels, at most."""
    return 1 + LIMBS * columns


def unpacked(data: Limbs, columns: int, rows: int) -> Limbs:
    """The inverse, of a sum of `rows` rows, for bytes that nobody vouches for."""
    count, rest = divmod(data.size - 1, columns)
    low = int(data[0]) if data.size else -1
    require(rest == 0 and count >= 1 and 0 <= low <= LIMBS - count, "sum: not limbs of this layout", "DATA_LOSS")
    total = np.zeros((LIMBS, columns), np.int64)
    total[low : low + count] = data[1:].reshape(count, columns)
    own, top, most = total[:-1], total[-1], rows << BITS
    sound = all(bool(ok.all()) for ok in (own >= -HALF, own < HALF, top >= -most, top <= most))
    require(sound, f"sum: not one of {rows} updates", "DATA_LOSS")
    return total


def _carried(total: Limbs) -> Limbs:
    """Every limb but the highest from -2^(BITS - 1) to 2^(BITS - 1) - 1: there is one such form of a number."""
    for limb in range(LIMBS - 1):
        carry = (total[limb] + HALF) >> BITS
        total[limb] -= carry << BITS
        total[limb + 1] += carry
    if np.abs(total[-1]).max(initial=0) >= MOST:
        raise FederationError("updates: too many, or not finite")
    return total
