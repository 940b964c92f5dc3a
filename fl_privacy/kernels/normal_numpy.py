"""The fast path of the ziggurat, in numpy: reference and fallback."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fill(
    words: NDArray[np.uint64],
    first: int,
    widths: NDArray[np.float64],
    limits: NDArray[np.int64],
    out: NDArray[np.float32],
    index: NDArray[np.int64],
    doubtful: NDArray[np.uint64],
    count: int,
) -> int:
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
