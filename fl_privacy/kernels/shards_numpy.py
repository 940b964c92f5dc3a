"""Split a vector among its owners and gather it again, in numpy: reference and fallback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Owners = NDArray[np.uint8] | NDArray[np.uint16]


def split(vector: NDArray[np.float32], owners: Owners, sizes: Sequence[int], out: NDArray[np.float32]) -> bool:
    """Fill `out` shard by shard, each in coordinate order; return False if a shard has the wrong size."""
    start = 0
    for owner, size in enumerate(sizes):
        part = vector[owners == owner]
        if part.size != size:
            return False
        out[start : start + size] = part
        start += size
    return True


def join(shards: Sequence[NDArray[np.float32]], owners: Owners, out: NDArray[np.float32]) -> bool:
    """Put every shard's coordinates back in place; return False if a shard does not have its mask's size."""
    for owner, shard in enumerate(shards):
        mask = owners == owner
        if np.count_nonzero(mask) != shard.size:
            return False
        out[mask] = shard
    return True
