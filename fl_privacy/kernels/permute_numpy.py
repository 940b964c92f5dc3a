"""Permute every column of a block by its own draws (Fisher-Yates), in numpy: reference and fallback."""

from __future__ import annotations

import numpy as np

from fl_privacy.kernels.arrays import I64, U32, U64


def any_rejected(words: U64, products: U64, floors: U64, mask: np.uint64) -> bool:
    """Whether any word must be drawn again: (word * product) mod 2^bits is below its floor."""
    return bool(np.any((words * products) & mask < floors))


def permute(matrix: U32, start: int, words: U64, tops: I64, bits: int) -> None:
    """Permute the columns from `start` on, one per row of `words`, in place."""
    columns, stop = words.shape[0], start + words.shape[0]
    log = max(columns - 1, 1).bit_length()  # rows of the copy are 2^log apart, so that an index is row bits | column
    copy = np.empty((matrix.shape[0], 1 << log), np.uint32)
    copy[:, :columns] = matrix[:, start:stop]
    flat, column = copy.reshape(-1), np.arange(columns, dtype=np.uint64)
    row_bits, mask = np.uint64(2**64 - 2**log), np.uint64(2**bits - 1)
    # The digit lands at bit `log` of the index by one shift, left or right.
    shift, place = (np.right_shift, bits - log) if bits >= log else (np.left_shift, log - bits)
    index = np.empty(columns, np.uint64)
    where = index.view(np.int64)
    for w in range(words.shape[1]):
        fractions = words[:, w] & mask
        for radix in range(int(tops[w]), int(tops[w + 1]), -1):
            np.multiply(fractions, np.uint64(radix), out=fractions)
            shift(fractions, np.uint64(place), out=index)
            np.bitwise_and(index, row_bits, out=index)
            np.bitwise_or(index, column, out=index)
            np.bitwise_and(fractions, mask, out=fractions)
            # Row radix - 1 is final after its swap, so it is written directly to the matrix.
            flat.take(where, out=matrix[radix - 1, start:stop], mode="clip")
            flat[where] = copy[radix - 1, :columns]
    matrix[0, start:stop] = copy[0, :columns]
