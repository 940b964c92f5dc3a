"""What the baselines have in common: an update is compressed and decompressed at the site, and travels as float32.

The receiver therefore learns exactly what the compressed form would tell it, which is what audits of leakage need. The
traffic is not smaller: `packed` says how many bytes the compressed form would take.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import Payload
from fl_privacy.crypto.keys import check_key
from fl_privacy.crypto.stream import Words
from fl_privacy.steps.base import At, Running, Seat, Step
from fl_privacy.vector import Vector

FLOAT_BITS = 32
UNIFORM_BITS = 53


class Baseline(Step):
    """A published compression, simulated at the site."""

    @abstractmethod
    def compressed(self, update: Vector, key: bytes) -> Vector:
        """The update after compression and decompression; `key` is single-use."""

    def start(self, seat: Seat) -> Running:
        return _Compressing(self, seat)


class _Compressing(Running):
    def __init__(self, terms: Baseline, seat: Seat) -> None:
        self._terms, self._seat = terms, seat

    def outward(self, update: Payload, at: At) -> Payload:
        return self._terms.compressed(update, self._seat.key(at, "compress"))


def count_of(share: float, parameters: int) -> int:
    """This share of the parameters as a number of them, at least 1."""
    return max(1, round(share * parameters))


def largest(update: Vector, count: int) -> NDArray[np.bool_]:
    """A mask of exactly `count` entries, none of them smaller in magnitude than an entry that is left out."""
    mask = np.zeros(update.size, np.bool_)
    if count:
        mask[np.argpartition(np.abs(update), update.size - count)[update.size - count :]] = True
    return mask


def words(count: int, key: bytes) -> NDArray[np.uint64]:
    """Random words from a single-use key."""
    check_key(key)
    return Words(key).take(count) if count else np.empty(0, np.uint64)


def uniforms(count: int, key: bytes) -> NDArray[np.float64]:
    """Multiples of 2^-53 in [0, 1) from a single-use key."""
    return (words(count, key) >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS


def sparse_bytes(kept: int, parameters: int) -> int:
    """`kept` float32 values, each with its index in as few bits as it needs."""
    return math.ceil(kept * (FLOAT_BITS + max(1, (parameters - 1).bit_length())) / 8)
