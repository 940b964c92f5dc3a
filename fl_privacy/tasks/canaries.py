"""Canaries: training records that take part by a fair coin each, so that an audit can ask which of them did."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fl_privacy.crypto.stream import Words

Rows = NDArray[np.int64]
Coins = NDArray[np.bool_]
WORD_BITS = 64


def chosen(records: int, fraction: float, seed: int, site: str) -> Rows:
    """Which of a site's training records are canaries, in order. That is public; which of them take part is not."""
    count = max(1, round(fraction * records)) if records else 0
    draw = np.random.default_rng(list(hashlib.sha256(f"{seed}/{site}/canaries".encode()).digest()))
    return np.sort(draw.choice(records, count, replace=False))


def tossed(count: int, key: bytes) -> Coins:
    """One independent fair coin per canary, from a single-use key."""
    words = Words(key).take(-(-count // WORD_BITS))
    return np.unpackbits(words.view(np.uint8), count=count).astype(bool)


def expected(records: int, canaries: int) -> int:
    """How many records a site trains on if half of its canaries take part: a number that no coin changes."""
    return records - canaries // 2
