"""Exactly uniform permutations from 64-bit words: batched Fisher-Yates draws with rejection.

A word's lowest `bits` bits are a fraction x in [0, 1). The digits of x in the mixed radix n, n - 1, ... are the draws
of Fisher-Yates: one word serves several radices with product P. 2^bits is not a multiple of P, so 2^bits mod P
words are rejected and drawn again (Lemire 2019, Algorithm 5; batched: Brackett-Rozinsky and Lemire 2024). The rest is
uniform: uniform words give no bias at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.crypto.stream import Words

MAX_ROWS = 65536
LARGEST_PRODUCT = 2**32  # a word is rejected with probability below 2^32 / 2^bits: 2^-27 for 20 rows


@dataclass(frozen=True)
class Plan:
    """The radices that each word of a column serves: word w serves tops[w] down to tops[w + 1] + 1."""

    bits: int
    tops: NDArray[np.int64]
    products: NDArray[np.uint64]
    floors: NDArray[np.uint64]

    @property
    def words(self) -> int:
        return len(self.products)

    @property
    def mask(self) -> np.uint64:
        return np.uint64(2**self.bits - 1)


@lru_cache(maxsize=64)
def plan(rows: int) -> Plan:
    """The draws that permute `rows` entries; a fraction times a radix fits in 64 bits."""
    return build(rows, 64 - rows.bit_length())


def build(rows: int, bits: int) -> Plan:
    """Radices `rows`, ..., 2 packed into words of `bits` random bits."""
    tops, products = [rows], [1]
    for radix in range(rows, 1, -1):
        if products[-1] * radix > LARGEST_PRODUCT:
            tops.append(radix)
            products.append(1)
        products[-1] *= radix
    floors = [2**bits % product for product in products]
    return Plan(bits, np.array([*tops, 1]), np.array(products, np.uint64), np.array(floors, np.uint64))


def accept(words: NDArray[np.uint64], key: bytes, first: int, draws: Plan, kernel: ModuleType) -> None:
    """Replace the rejected words of the columns `first`, `first` + 1, ... (one per row of `words`), in place.

    Each column has its own stream of replacements, so they depend only on the key and the column.
    """
    if not kernel.any_rejected(words, draws.products, draws.floors, draws.mask):
        return
    spares: dict[int, Words] = {}
    for row, w in np.argwhere(rejected(words, draws.products, draws.floors, draws.mask)).tolist():
        spare = spares.setdefault(row, Words(key, stream=1 + first + row))
        while rejected(words[row, w], draws.products[w], draws.floors[w], draws.mask):
            words[row, w] = spare.take(1)[0]


def rejected(words: Any, products: Any, floors: Any, mask: np.uint64) -> Any:
    """Lemire's test: the remainder (word * product) mod 2^bits is below 2^bits mod product."""
    with np.errstate(over="ignore"):  # the product is modulo 2^64 by design
        return (words * products) & mask < floors
