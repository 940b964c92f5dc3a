"""Sums of numbers by the bytes of a random word for each of them, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16  # sums of that many numbers below 2^32 are exact in float64
HALF, LOW = np.uint64(32), np.uint64(2**32 - 1)


def by_byte(numbers: NDArray[np.unsignedinteger], words: NDArray[np.uint64], sums: NDArray[np.uint64]) -> None:
    """Add every number to sums[g, b], where b is byte g of its word, modulo 2^64."""
    taken = words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
    for start in range(0, numbers.size, BLOCK):
        part, at = numbers[start : start + BLOCK].astype(np.uint64), taken[start : start + BLOCK]
        for g, row in enumerate(sums):
            row += np.bincount(at[:, g], (part & LOW).astype(np.float64), row.size).astype(np.uint64)
            if numbers.dtype.itemsize > 4:
                row += np.bincount(at[:, g], (part >> HALF).astype(np.float64), row.size).astype(np.uint64) << HALF
