"""The fast path of the ziggurat, compiled: turns words into samples and lists the doubtful ones."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F32, F64, I64, U64
from fl_privacy.kernels.jit import compiled


@compiled
def _fill(
    words: I64, first: int, widths: F64, limits: I64, shift: np.int64, out: F32, index: I64, doubtful: I64, count: int
) -> int:
    mask = np.uint64(widths.size - 1)
    for i in range(out.size):
        word = words[i]
        layer = np.uint64(word) & mask
        fraction = (word >> shift) | np.int64(1)
        out[i] = np.float32(np.float64(fraction) * widths[layer])
        if abs(fraction) >= limits[layer]:
            index[count] = first + i
            doubtful[count] = word
            count += 1
    return count


def fill(words: U64, first: int, widths: F64, limits: I64, out: F32, index: I64, doubtful: U64, count: int) -> int:
    """Compute sample `first` + i from word i; append the doubtful ones to the `count` so far and return the new count.

    The lowest bits select a layer; the others, whose lowest bit is always 1, are a signed fraction of its width.
    """
    shift = np.int64(widths.size.bit_length() - 2)
    signed = words.view(np.int64), doubtful.view(np.int64)
    return int(_fill(signed[0], first, widths, limits, shift, out, index, signed[1], count))
