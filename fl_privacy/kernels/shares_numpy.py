"""The passes over shares, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.unsignedinteger]
HALF = np.uint64(32)


def absorb(words: Numbers, product: int, bound: int, total: Numbers) -> int:
    """Add floor(w P / 2^32) of every word modulo P; how many of the words are to be drawn again."""
    scaled = words.astype(np.uint64) * np.uint64(product)
    total += (scaled >> HALF).astype(np.uint32)
    np.subtract(total, np.uint32(product), out=total, where=total >= product)
    return int(np.count_nonzero((scaled & np.uint64(2**32 - 1)) < bound))


def reduce(numbers: Numbers, m: int, out: Numbers) -> None:
    """Numbers below 2^24 modulo m."""
    out[:] = numbers % np.uint32(m)


def combine(left: Numbers, right: Numbers, m: int, sign: int, out: Numbers) -> None:
    """The sum or the difference of reduced rows, reduced; `left` may be of a larger type than the others."""
    left = left.astype(out.dtype, copy=False)
    if m == 1 << 8 * out.itemsize:
        (np.add if sign > 0 else np.subtract)(left, right, out=out)
        return
    if sign < 0:
        right = out.dtype.type(m) - right  # at most m
        right[right == m] = 0
    # Where left + right does not fit the type, it has lost a multiple of 2^bits, and so has m: the difference is right.
    np.add(left, right, out=out)
    over = (out >= m) | (out < left)
    np.subtract(out, out.dtype.type(m), out=out, where=over)
