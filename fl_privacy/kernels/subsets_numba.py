"""Sums of numbers by the bytes of a random word for each of them, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.kernels.jit import compiled


@compiled
def _by_byte(numbers: Any, words: Any, sums: Any) -> None:
    eight, last = np.uint64(8), np.uint64(255)
    for i in range(numbers.size):
        word, number = words[i], np.uint64(numbers[i])
        for g in range(sums.shape[0]):
            sums[g, word & last] += number
            word >>= eight


def by_byte(numbers: NDArray[np.unsignedinteger], words: NDArray[np.uint64], sums: NDArray[np.uint64]) -> None:
    """Add every number to sums[g, b], where b is byte g of its word, modulo 2^64."""
    _by_byte(numbers, words, sums)
