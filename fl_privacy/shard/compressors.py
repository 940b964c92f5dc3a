"""Unbiased compressors for DSC (ERIS, Definition of an unbiased compressor): E[C(x)] = x, E|C(x) - x|^2 <= omega |x|^2.

A compressor turns the coordinates that its key selects into 32-bit words, and such words into numbers. Sender and
receiver run the same additions on the same bits, so that what both keep stays equal to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.shard.subset import Indices, subset
from fl_privacy.vector import Vector

Packed = NDArray[np.uint32]
Touched = Indices | slice
Told = tuple[NDArray[np.int64] | None, Vector]
BLOCK = 256  # coordinates that share a norm when they are quantised
LARGEST = 1e30  # of a value that travels: sums of many stay finite


class Compressor(Protocol):
    """For vectors of one length."""

    @property
    def omega(self) -> float:
        """The variance of C(x) relative to |x|^2, at most."""

    @property
    def words(self) -> int:
        """32-bit words of a message."""

    def touched(self, key: bytes) -> Touched:
        """The coordinates where C(x) may differ from zero."""

    def compress(self, x: Vector, key: bytes) -> Packed:
        """C(x) as it travels, from the touched coordinates of x."""

    def values(self, packed: Packed) -> Vector:
        """The float32 numbers of a message."""

    def expand(self, packed: Packed) -> Vector:
        """C(x) at the touched coordinates."""

    def told(self, packed: Packed, key: bytes) -> Told:
        """The coordinates that a message is about (None: all), and the difference there, as exactly as it says."""


@dataclass(frozen=True)
class Sparse:
    """Random sparsification: k = ceil(p d) coordinates, each kept with probability k / d and divided by it.

    The paper keeps every coordinate with probability p on its own. A fixed number has the same mean and omega, and
    gives messages one size.
    """

    d: int
    p: float

    def __post_init__(self) -> None:
        _check_length(self.d)
        if not 0 < self.p <= 1:
            raise FederationError(f"p: {self.p} is not in (0, 1]")

    @cached_property
    def words(self) -> int:
        return min(self.d, math.ceil(self.p * self.d))

    @property
    def omega(self) -> float:
        """d/k - 1; at most 1/p - 1."""
        return self.d / self.words - 1 if self.d else 0.0

    def touched(self, key: bytes) -> Indices:
        return subset(self.d, self.words, key)

    def compress(self, x: Vector, key: bytes) -> Packed:
        with np.errstate(over="ignore"):  # what is too large is refused below
            values = x * np.float32(1 + self.omega)
        return _sendable(values).view(np.uint32)

    def values(self, packed: Packed) -> Vector:
        return packed.view(np.float32)

    expand = values

    def told(self, packed: Packed, key: bytes) -> Told:
        return subset(self.d, self.words, key), self.values(packed) / np.float32(1 + self.omega)


@dataclass(frozen=True)
class Quantised:
    """Stochastic quantisation (QSGD, Alistarh et al. 2017): norms of blocks, and 8-bit levels rounded at random."""

    d: int
    levels: int = 127

    def __post_init__(self) -> None:
        _check_length(self.d)
        if not 1 <= self.levels <= 127:
            raise FederationError(f"levels: {self.levels} is not between 1 and 127")

    @property
    def _blocks(self) -> int:
        return -(-self.d // BLOCK)

    @property
    def words(self) -> int:
        """A norm per block and four coordinates per word."""
        return self._blocks * (1 + BLOCK // 4)

    @property
    def omega(self) -> float:
        """min(B / levels^2, sqrt(B) / levels) for blocks of B coordinates (QSGD, Lemma 3.1)."""
        return min(BLOCK / self.levels**2, math.sqrt(BLOCK) / self.levels)

    def touched(self, key: bytes) -> slice:
        return slice(None)

    def compress(self, x: Vector, key: bytes) -> Packed:
        padded = np.zeros((self._blocks, BLOCK), np.float32)
        padded.reshape(-1)[: self.d] = x
        norms = _sendable(np.sqrt(np.square(padded, dtype=np.float64).sum(axis=1)).astype(np.float32))
        scaled = np.abs(padded) * (self.levels / np.maximum(norms, np.finfo(np.float32).tiny))[:, None]
        scaled += self._uniform(key)
        rounded = np.minimum(np.floor(scaled), self.levels) * np.sign(padded)
        return np.concatenate([norms.view(np.uint32), rounded.astype(np.int8).reshape(-1).view(np.uint32)])

    def values(self, packed: Packed) -> Vector:
        return packed[: self._blocks].view(np.float32)

    def expand(self, packed: Packed) -> Vector:
        norms = self.values(packed) * np.float32(1 / self.levels)
        levels = packed[self._blocks :].view(np.int8).reshape(self._blocks, BLOCK)
        found: Vector = (levels * norms[:, None]).reshape(-1)[: self.d]
        return found

    def told(self, packed: Packed, key: bytes) -> Told:
        return None, self.expand(packed)

    def _uniform(self, key: bytes) -> Vector:
        drawn = Words(key).take(self._blocks * BLOCK) >> np.uint64(40)
        return (drawn.astype(np.float32) * np.float32(2.0**-24)).reshape(self._blocks, BLOCK)


def bounded(values: Vector) -> bool:
    """Whether all values are finite and small enough to travel."""
    return not values.size or bool(values.max() < LARGEST and values.min() > -LARGEST)


def _sendable(values: Vector) -> Vector:
    if not bounded(values):
        raise FederationError("update: too large to be compressed as float32; lower task.train.lr")
    return values


def _check_length(d: int) -> None:
    if d < 0:
        raise FederationError(f"d: {d} is not a number of coordinates")
