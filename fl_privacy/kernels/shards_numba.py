"""Split a vector among its owners and gather it again, compiled: one pass with one cursor per owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_privacy.kernels.arrays import F32, I64, U32, U64, Owners
from fl_privacy.kernels.jit import compiled

SPLIT_TILE = 1024
JOIN_TILE = 2**15  # values, owners and results of a tile fit in the L2 cache


# Two coordinates per step: loading a cursor right after storing it is slow, so a step loads both before it stores.


@compiled
def _places(owners: Owners, cursors: U64, places: U32) -> None:
    """The place of each coordinate: its owner's cursor, which then advances by one."""
    one = np.uint64(1)
    even = owners.size - owners.size % 2
    for c in range(0, even, 2):
        first, second = owners[c], owners[c + 1]
        at, then = cursors[first], cursors[second] + np.uint64(first == second)
        cursors[first] = at + one
        cursors[second] = then + one
        places[c] = np.uint32(at)
        places[c + 1] = np.uint32(then)
    for c in range(even, owners.size):
        places[c] = np.uint32(cursors[owners[c]])
        cursors[owners[c]] += one


@compiled
def _scatter(values: F32, places: U32, out: F32) -> None:
    for c in range(values.size):
        out[places[c]] = values[c]


@compiled
def _gather(values: F32, owners: Owners, cursors: U64, out: F32) -> None:
    """Read each coordinate at its owner's cursor, which then advances by one."""
    one = np.uint64(1)
    even = owners.size - owners.size % 2
    for c in range(0, even, 2):
        first, second = owners[c], owners[c + 1]
        at, then = cursors[first], cursors[second] + np.uint64(first == second)
        cursors[first] = at + one
        cursors[second] = then + one
        out[c] = values[at]
        out[c + 1] = values[then]
    for c in range(even, owners.size):
        out[c] = values[cursors[owners[c]]]
        cursors[owners[c]] += one


@compiled
def _count(owners: Owners, counts: I64) -> None:
    """Count the coordinates of each owner, in four histograms for the same reason."""
    banks = np.zeros((4, counts.size), np.int64)
    whole = owners.size - owners.size % 4
    for c in range(0, whole, 4):
        for bank in range(4):
            banks[bank, owners[c + bank]] += 1
    for c in range(whole, owners.size):
        banks[0, owners[c]] += 1
    counts[:] = banks[0] + banks[1] + banks[2] + banks[3]


@compiled
def _split(vector: F32, owners: Owners, cursors: U64, ends: U64, out: F32) -> bool:
    """Places first, then values: a store whose address depends on the cursor just stored would stall the next load."""
    places = np.empty(SPLIT_TILE, np.uint32)
    for first in range(0, owners.size, SPLIT_TILE):
        last = min(first + SPLIT_TILE, owners.size)
        _places(owners[first:last], cursors, places[: last - first])
        for owner in range(cursors.size):
            if cursors[owner] > ends[owner]:
                return False
        _scatter(vector[first:last], places[: last - first], out)
    return True


def split(vector: F32, owners: Owners, sizes: Sequence[int], out: F32) -> bool:
    """Fill `out` shard by shard, each in coordinate order; return False if a shard has the wrong size."""
    ends = np.cumsum(sizes).astype(np.uint64)
    cursors = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
    return _split(vector, owners, cursors, ends, out)


def join(shards: Sequence[F32], owners: Owners, out: F32) -> bool:
    """Put every shard's coordinates back in place; return False if a shard does not have its mask's size."""
    # Shards are separate arrays, so each tile's parts are first copied together.
    together = np.empty(JOIN_TILE, np.float32)
    counts, cursors = np.empty(len(shards), np.int64), np.empty(len(shards), np.uint64)
    done = [0] * len(shards)
    for first in range(0, owners.size, JOIN_TILE):
        tile = owners[first : first + JOIN_TILE]
        _count(tile, counts)
        start = 0
        for owner, count in enumerate(counts.tolist()):
            part = shards[owner][done[owner] : done[owner] + count]
            if part.size != count:
                return False
            together[start : start + count] = part
            cursors[owner] = start
            start += count
            done[owner] += count
        _gather(together, tile, cursors, out[first : first + JOIN_TILE])
    return True
