"""Additive shares of counts, modulo 2^64: any set of them but all is uniform noise."""

from __future__ import annotations

import numpy as np

from fl_privacy.crypto.stream import Words
from fl_privacy.scores.form import Counts


def split(counts: Counts, parts: int, key: bytes) -> list[Counts]:
    """As many shares, which add up to the counts; `key` is used for these counts alone."""
    stream = Words(key)
    # An even number of words, as the stream is read in blocks of two.
    random = [stream.take(counts.size + counts.size % 2)[: counts.size].copy() for _ in range(parts - 1)]
    return [*random, counts - added(random, counts.size)]


def added(vectors: list[Counts], length: int) -> Counts:
    """The sum of vectors of this length."""
    total = np.zeros(length, np.uint64)
    for vector in vectors:
        total += vector
    return total
