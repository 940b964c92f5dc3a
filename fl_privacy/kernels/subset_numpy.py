"""The passes over the draws of a subset, in numpy: reference and fallback."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import F64, I64, U64


def uniform(words: U64, bits: int) -> F64:
    """Numbers in (0, 1] from the upper bits of random words."""
    found: F64 = ((words >> np.uint64(64 - bits)) + np.uint64(1)).astype(np.float64)
    found *= 2.0**-bits
    return found


def places(gaps: F64, d: int) -> I64:
    """The partial sums but the last, relative to the last, as places below d, without repeats; overwrites the gaps."""
    np.cumsum(gaps, out=gaps)
    gaps *= d / gaps[-1]
    found: I64 = np.minimum(gaps[:-1].astype(np.int64), d - 1)
    first = np.ones(found.size, bool)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found[first]
