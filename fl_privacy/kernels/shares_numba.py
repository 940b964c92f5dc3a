"""The passes over shares, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.kernels.jit import compiled

Numbers = NDArray[np.unsignedinteger]


@compiled
def _absorb(words: Any, product: np.uint64, bound: np.uint64, total: Any) -> int:
    bad, half, low, most = 0, np.uint64(32), np.uint64(0xFFFFFFFF), np.uint32(product)
    for i in range(words.size):
        scaled = np.uint64(words[i]) * product
        found = np.uint32(total[i] + np.uint32(scaled >> half))
        total[i] = np.uint32(found - most) if found >= most else found
        if (scaled & low) < bound:
            bad += 1
    return bad


@compiled
def _reduce(numbers: Any, m: np.int32, inverse: np.float32, out: Any) -> None:
    for i in range(numbers.size):
        number = np.int32(numbers[i])
        rest = np.int32(number - np.int32(np.float32(number) * inverse) * m)  # the quotient is off by at most one
        rest = np.int32(rest + m) if rest < 0 else rest
        out[i] = np.int32(rest - m) if rest >= m else rest


@compiled
def _plus(left: Any, right: Any, m: Any, out: Any) -> None:
    for i in range(out.size):
        room = m - right[i]
        out[i] = left[i] - room if left[i] >= room else left[i] + right[i]


@compiled
def _minus(left: Any, right: Any, m: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = left[i] - right[i] if left[i] >= right[i] else left[i] + (m - right[i])


def absorb(words: Numbers, product: int, bound: int, total: Numbers) -> int:
    """Add floor(w P / 2^32) of every word modulo P; how many of the words are to be drawn again."""
    return int(_absorb(words, np.uint64(product), np.uint64(bound), total))


def reduce(numbers: Numbers, m: int, out: Numbers) -> None:
    """Numbers below 2^24 modulo m."""
    _reduce(numbers, np.int32(m), np.float32(1 / m), out)


def combine(left: Numbers, right: Numbers, m: int, sign: int, out: Numbers) -> None:
    """The sum or the difference of reduced rows, reduced; `left` may be of a larger type than the others."""
    if m == 1 << 8 * out.itemsize:  # the type itself wraps
        (np.add if sign > 0 else np.subtract)(left, right, out=out, casting="unsafe")
        return
    (_plus if sign > 0 else _minus)(left, right, out.dtype.type(m), out)
