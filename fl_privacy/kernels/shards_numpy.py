"""Split a vector among its owners and gather it again, in numpy: reference and fallback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_privacy.kernels.arrays import F32, Owners


def split(vector: F32, owners: Owners, sizes: Sequence[int], out: F32) -> bool:
    """Fill `out` shard by shard, each in coordinate order; return False if a shard has the wrong size."""
    start = 0
    for owner, size in enumerate(sizes):
        part = vector[owners == owner]
        if part.size != size:
            return False
        out[start : start + size] = part
        start += size
    return True


def join(shards: Sequence[F32], owners: Owners, out: F32) -> bool:
    """Put every shard's coordinates back in place; return False if a shard does not have its mask's size."""
    for owner, shard in enumerate(shards):
        mask = owners == owner
        if np.count_nonzero(mask) != shard.size:
            return False
        out[mask] = shard
    return True
