"""Uniform subsets of coordinates from a key: sender and receiver draw the same ones, so that indices never travel."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError

Indices = NDArray[np.int64]
FRACTION = 53  # random bits of a draw


@lru_cache(maxsize=4)  # a round uses the same one several times
def subset(d: int, k: int, key: bytes) -> Indices:
    """k of the coordinates 0 to d - 1, ascending and read-only; every set of k has the same probability.

    Drawing with replacement until k different ones were drawn gives exactly that. Beyond d / 2, those that are left out
    are drawn instead: there are fewer of them.
    """
    if not 0 <= k <= d:
        raise FederationError(f"k: {k} is not between 0 and the {d} coordinates")
    stream = Words(key)
    if 2 * k <= d:
        found = _drawn(d, k, stream)
    else:
        kept = np.ones(d, bool)
        kept[_drawn(d, d - k, stream)] = False
        found = np.flatnonzero(kept)
    found.flags.writeable = False
    return found


def _drawn(d: int, k: int, stream: Words) -> Indices:
    found = _ascending(d, k, stream)
    while found.size < k:
        more = _ascending(d, k - found.size, stream)
        places = np.searchsorted(found, more)
        new = found[np.minimum(places, found.size - 1)] != more
        found = np.insert(found, places[new], more[new])
    return found


def _ascending(d: int, count: int, stream: Words) -> Indices:
    """Uniform draws in ascending order without sorting: partial sums of exponential gaps, relative to their total.

    Repeats are left out.
    """
    if not count:
        return np.empty(0, np.int64)
    kernel = kernels.pick("subset", d)
    gaps = kernel.uniform(stream.take(count + 1), FRACTION)
    np.log(gaps, out=gaps)  # negative; the sign cancels
    found: Indices = kernel.places(gaps, d)
    return found
