"""The fast path of the ziggurat, in numpy: reference and fallback."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F32, F64, I64, U64


def fill(words: U64, first: int, widths: F64, limits: I64, out: F32, index: I64, doubtful: U64, count: int) -> int:
    """Compute sample `first` + i from word i; append the doubtful ones to the `count` so far and return the new count.

    The lowest bits select a layer; the others, whose lowest bit is always 1, are a signed fraction of its width.
    """
    signed = words.view(np.int64)
    layer = signed & np.int64(widths.size - 1)
    fraction = (signed >> np.int64(widths.size.bit_length() - 2)) | np.int64(1)
    np.multiply(fraction, widths.take(layer), out=out, casting="same_kind")
    found = np.flatnonzero(np.abs(fraction) >= limits.take(layer))
    stop = count + found.size
    index[count:stop] = found + first
    doubtful[count:stop] = words[found]
    return stop
