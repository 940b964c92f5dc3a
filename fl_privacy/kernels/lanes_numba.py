"""Packed numbers of few bits, compiled: blocks of lanes, and the layout of residues as arrays."""

from __future__ import annotations

from functools import cache

import numpy as np

from fl_privacy.kernels import words32 as w
from fl_privacy.kernels.arrays import I64, U32
from fl_privacy.kernels.jit import compiled
from fl_privacy.kernels.packed import ROWS, parts


@cache
def layout_of(moduli: tuple[int, ...]) -> tuple[I64, I64]:
    """Rows (bits, first field, its end in twos and in fours) of parts, (modulus, row, first, shift, size) of fields.

    Fields are worked on in twos and fours: a part with fewer has more, of modulus 1 and 0 bits.
    """
    parted: list[tuple[int, ...]] = []
    fields: list[tuple[int, ...]] = []
    for part in parts(moduli):
        begin = len(fields)
        # A modulus of 2^64 has no int64, but then only its two parts matter.
        fields += [(min(moduli[f.row], 2**63 - 1), f.row, f.first, f.shift, f.size) for f in part.fields]
        fields += [(1, part.fields[0].row, 0, 0, 0)] * (-len(part.fields) % 4)
        parted.append((part.bits, begin, begin + len(part.fields) + len(part.fields) % 2, len(fields)))
    return np.array(parted, np.int64), np.array(fields, np.int64)


@compiled
def pack_lanes(numbers: U32, wide: int, bits: int, words: U32) -> None:
    """One block of `wide` lanes. Unsigned indices need no check for negative ones, which vectors cannot do."""
    lanes = np.uint64(wide)
    for row in range(ROWS):
        shift = (row * bits) & 31
        source, target = np.uint64(row * wide), np.uint64(((row * bits) >> 5) * wide)
        up, down = np.uint32(shift), np.uint32(ROWS - shift)
        if shift:
            for i in range(lanes):
                words[target + i] = w.either(words[target + i], w.left(numbers[source + i], up))
        else:
            for i in range(lanes):
                words[target + i] = numbers[source + i]
        if shift + bits > ROWS:
            target += lanes
            for i in range(lanes):
                words[target + i] = w.right(numbers[source + i], down)


@compiled
def unpack_lanes(words: U32, wide: int, bits: int, numbers: U32) -> None:
    mask, lanes = np.uint32((1 << bits) - 1), np.uint64(wide)
    for row in range(ROWS):
        shift = (row * bits) & 31
        target, source = np.uint64(row * wide), np.uint64(((row * bits) >> 5) * wide)
        down, up = np.uint32(shift), np.uint32(ROWS - shift)
        if shift + bits > ROWS:
            after = source + lanes
            for i in range(lanes):
                two = w.either(w.right(words[source + i], down), w.left(words[after + i], up))
                numbers[target + i] = w.both(two, mask)
        else:
            for i in range(lanes):
                numbers[target + i] = w.both(w.right(words[source + i], down), mask)
