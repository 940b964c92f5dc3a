"""The passes over the draws of a subset, compiled."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F64, I64, U64
from fl_privacy.kernels.jit import compiled


@compiled
def _uniform(words: U64, out: F64, drop: np.uint64, scale: float) -> None:
    for i in range(words.size):
        out[i] = np.float64(np.int64(words[i] >> drop) + 1) * scale


@compiled
def _places(gaps: F64, d: int, out: I64) -> int:
    total = 0.0
    for i in range(gaps.size):
        total += gaps[i]
        gaps[i] = total
    scale, found, last = d / total, 0, -1
    for i in range(gaps.size - 1):
        place = min(int(gaps[i] * scale), d - 1)
        if place != last:
            out[found] = place
            last = place
            found += 1
    return found


def uniform(words: U64, bits: int) -> F64:
    """Numbers in (0, 1] from the upper bits of random words."""
    out = np.empty(words.size)
    _uniform(words, out, np.uint64(64 - bits), 2.0**-bits)
    return out


def places(gaps: F64, d: int) -> I64:
    """The partial sums but the last, relative to the last, as places below d, without repeats; overwrites the gaps."""
    out = np.empty(gaps.size, np.int64)
    return out[: _places(gaps, d, out)]
