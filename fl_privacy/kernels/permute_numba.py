"""Permute every column of a block by its own draws (Fisher-Yates), compiled.

The draws of a column are digits of fixed-point fractions: `fraction * radix` has the next digit above `bits` and the
next fraction below it. Row i, from the last to the second, is swapped with the row given by the digit of radix i + 1.
"""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import I64, U32, U64
from fl_privacy.kernels.jit import compiled

OBLIVIOUS_ROWS = 24  # above this, n (n - 1) / 2 vector exchanges cost more than n - 1 scalar swaps
TILE = 1024  # columns whose draws fit in the L1 cache


@compiled
def any_rejected(words: U64, products: U64, floors: U64, mask: np.uint64) -> bool:
    """Whether any word must be drawn again: (word * product) mod 2^bits is below its floor."""
    found = np.uint64(0)
    for w in range(words.shape[1]):
        product, floor = products[w], floors[w]
        for c in range(words.shape[0]):
            found |= np.uint64((words[c, w] * product) & mask < floor)
    return bool(found)


# The small functions below exist because LLVM vectorises a loop over whole contiguous arguments, but not the same loop
# nested in another one.


@compiled
def _copy(source: U32, target: U32) -> None:
    for c in range(target.size):
        target[c] = source[c]


@compiled
def _draw(fractions: U64, digits: U32, radix: np.uint64, bits: np.uint64, mask: np.uint64) -> None:
    """Extract the next digit of every fraction and keep the rest of the fraction."""
    for c in range(digits.size):
        scaled = fractions[c] * radix
        digits[c] = np.uint32(scaled >> bits)
        fractions[c] = scaled & mask


@compiled
def _exchange(one: U32, two: U32, digits: U32, row: np.uint32) -> None:
    """Swap two rows where the digit is `row`, without a branch or an address that depends on it."""
    for c in range(digits.size):
        change = (one[c] ^ two[c]) & (np.uint32(0) - np.uint32(digits[c] == row))
        one[c] ^= change
        two[c] ^= change


@compiled
def _oblivious(matrix: U32, start: int, words: U64, tops: I64, bits: np.uint64) -> None:
    """Touch all candidates of a swap: this vectorises, and cache timing does not reveal the draw to a co-tenant."""
    mask = (np.uint64(1) << bits) - np.uint64(1)
    rows, columns = matrix.shape[0], words.shape[0]
    # A compact copy of the tile: rows of the matrix may be a power of two apart and compete for the same cache sets.
    tile = np.empty((rows, TILE), np.uint32)
    fractions = np.empty(TILE, np.uint64)
    digits = np.empty(TILE, np.uint32)
    for at in range(0, columns, TILE):
        width = min(TILE, columns - at)
        first, last = start + at, start + at + width
        for i in range(rows):
            _copy(matrix[i, first:last], tile[i, :width])
        for w in range(words.shape[1]):
            for c in range(width):
                fractions[c] = words[at + c, w] & mask
            for radix in range(tops[w], tops[w + 1], -1):
                _draw(fractions[:width], digits[:width], np.uint64(radix), bits, mask)
                for row in range(radix - 1):
                    _exchange(tile[radix - 1, :width], tile[row, :width], digits[:width], np.uint32(row))
        for i in range(rows):
            _copy(tile[i, :width], matrix[i, first:last])


@compiled
def _swapping(matrix: U32, start: int, words: U64, tops: I64, bits: np.uint64) -> None:
    """One swap per draw, for many rows."""
    mask = (np.uint64(1) << bits) - np.uint64(1)
    columns = words.shape[0]
    fractions = np.empty(columns, np.uint64)
    for w in range(words.shape[1]):
        for c in range(columns):
            fractions[c] = words[c, w] & mask
        for radix in range(tops[w], tops[w + 1], -1):
            factor = np.uint64(radix)
            last = matrix[radix - 1]
            for c in range(columns):
                scaled = fractions[c] * factor
                other = scaled >> bits
                fractions[c] = scaled & mask
                last[start + c], matrix[other, start + c] = matrix[other, start + c], last[start + c]


def permute(matrix: U32, start: int, words: U64, tops: I64, bits: int) -> None:
    """Permute the columns from `start` on, one per row of `words`, in place."""
    kernel = _oblivious if matrix.shape[0] <= OBLIVIOUS_ROWS else _swapping
    kernel(matrix, start, words, tops, np.uint64(bits))
