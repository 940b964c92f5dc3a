"""FSA's masks: which aggregator owns which coordinate, and how to split and join vectors (ERIS, section on FSA)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.vector import Vector

Owners = NDArray[np.uint8] | NDArray[np.uint16]
MAX_AGGREGATORS = 2**16
MAX_COORDINATES = 2**32
PIECE = 2**16  # words drawn at a time


def sizes(d: int, aggregators: int, shares: Sequence[float] = ()) -> list[int]:
    """Shard sizes: near-equal, or in proportion to `shares` by largest remainders; ties go to the first."""
    if not shares:
        small, larger = divmod(d, aggregators)
        return [small + (a < larger) for a in range(aggregators)]
    if len(shares) != aggregators or not all(0 < share < math.inf for share in shares):
        raise FederationError(f"shares: {list(shares)} are not {aggregators} positive numbers")
    exact = [Fraction(share) * d / sum(map(Fraction, shares)) for share in shares]
    found = [int(part) for part in exact]
    remainders = sorted(range(aggregators), key=lambda a: found[a] - exact[a])
    for a in remainders[: d - sum(found)]:
        found[a] += 1
    return found


def owners(d: int, aggregators: int, seed: int | bytes, shares: Sequence[float] = ()) -> Owners:
    """The owner of every coordinate: disjoint and complete masks of the sizes above, from a public seed.

    Every coordinate draws a 64-bit key; the keys' ranks are a uniform permutation, and each aggregator owns a range of
    ranks. Only the keys at the ends of the ranges are needed, so nothing is sorted. If two keys tie at such an end
    (probability below 2^-40 per round), all keys are drawn again.
    """
    _check_aggregators(aggregators)
    if not 0 <= d < MAX_COORDINATES:
        raise FederationError(f"d: {d} is not a number of coordinates from 0 to {MAX_COORDINATES - 1}")
    counts = sizes(d, aggregators, shares)
    ends = np.cumsum(counts)[:-1]
    ends = ends[ends < d]  # with more aggregators than coordinates, the last ones own nothing
    for attempt in range(8):
        ranks = _keys(d, seed, attempt)
        bounds = np.partition(ranks, ends)[ends] if d else ranks
        found = _locate(ranks, bounds, aggregators)
        if np.array_equal(np.bincount(found, minlength=aggregators), counts):
            return found
    raise FederationError("owners: eight ties in a row; the stream of this seed is broken")


def split(
    vector: Vector,
    owners: Owners,
    aggregators: int,
    *,
    shares: Sequence[float] = (),
    out: Vector | None = None,
    backend: str | None = None,
) -> list[Vector]:
    """The shard of every aggregator in coordinate order, as views of `out`, which can be reused."""
    _check_aggregators(aggregators)
    _check_vector("vector", vector, owners.size)
    _check_range(owners, aggregators)
    target = _target(out, owners.size, [vector])
    counts = sizes(owners.size, aggregators, shares)
    if not kernels.pick("shards", vector.size, backend).split(vector, owners, counts, target):
        raise FederationError(f"owners: not {aggregators} shards of these sizes; use masks.owners")
    return np.split(target, np.cumsum(counts)[:-1])


def join(
    shards: Sequence[Vector],
    owners: Owners,
    *,
    shares: Sequence[float] = (),
    out: Vector | None = None,
    backend: str | None = None,
) -> Vector:
    """Reassemble a vector from its shards: the inverse of `split`, written to `out` if given."""
    _check_aggregators(len(shards))
    for index, (shard, size) in enumerate(zip(shards, sizes(owners.size, len(shards), shares), strict=True)):
        _check_vector(f"shard {index}", shard, size)
    _check_range(owners, len(shards))
    target = _target(out, owners.size, shards)
    if not kernels.pick("shards", owners.size, backend).join(shards, owners, target):
        raise FederationError(f"owners: not {len(shards)} shards of these sizes; use masks.owners")
    return target


def _keys(d: int, seed: int | bytes, attempt: int) -> NDArray[np.uint64]:
    """One 64-bit key per coordinate, from AES-256 in counter mode keyed by a hash of the seed."""
    tagged = b"bytes:" + seed if isinstance(seed, bytes) else b"int:%d" % seed
    stream = Words(hashlib.sha256(b"fl-privacy masks 1:%d:" % attempt + tagged).digest())
    drawn = np.empty(d, np.uint64)
    for first in range(0, d, PIECE):
        piece = drawn[first : first + PIECE]
        piece[:] = stream.take(piece.size)
    return drawn


def _locate(ranks: NDArray[np.uint64], bounds: NDArray[np.uint64], aggregators: int) -> Owners:
    """The owner of each key: the number of bounds it reaches."""
    if aggregators > 2**8:
        return np.searchsorted(bounds, ranks, side="right").astype(np.uint16)
    found = np.zeros(ranks.size, np.uint8)
    for bound in bounds:
        found += ranks >= bound
    return found


def _check_aggregators(aggregators: int) -> None:
    if not 1 <= aggregators <= MAX_AGGREGATORS:
        raise FederationError(f"aggregators: {aggregators} is not between 1 and {MAX_AGGREGATORS}")


def _check_vector(name: str, vector: Vector, size: int) -> None:
    if vector.shape != (size,) or vector.dtype != np.float32 or not vector.flags.c_contiguous:
        raise FederationError(
            f"{name}: {vector.dtype} of shape {vector.shape}, but the masks need a contiguous float32 vector of {size}"
        )


def _target(out: Vector | None, size: int, sources: Sequence[Vector]) -> Vector:
    if out is None:
        return np.empty(size, np.float32)
    _check_vector("out", out, size)
    if not out.flags.writeable or any(np.may_share_memory(out, source) for source in sources):
        raise FederationError("out: read-only, or shares memory with an input; pass another vector")
    return out


def _check_range(owners: Owners, aggregators: int) -> None:
    if owners.size and int(owners.max()) >= aggregators:
        raise FederationError(f"owners: contain aggregator {owners.max()} of {aggregators}; use the round's masks")
