"""Integers, residues and their packed bits, compiled. Layout and results as in the numpy twin.

Work goes block by block, so that the numbers of a block stay in the cache between its steps. The inner loops run over
a block or its lanes without branches, two moduli at a time: the compiler makes vector instructions of them. Residues
need no division: for an integer x, floor((x + 1/2) / m) is floor(x / m), and (x + 1/2) / m is at least 1/(2m) away from
the next integer, which is more than the rounding of a product with 1/m for x below 2^21 (float32) or 2^49 (float64).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.kernels import residues_numpy, words32 as w
from fl_privacy.kernels.arrays import F32, F64, I64, U32
from fl_privacy.kernels.jit import compiled
from fl_privacy.kernels.lanes_numba import layout_of, pack_lanes, unpack_lanes
from fl_privacy.kernels.packed import BLOCK, LANES, ROWS, SHARED, bits_of, parts
from fl_privacy.kernels.residues_numpy import Residues

SINGLE, DOUBLE = 2**21, 2**49  # integers below it have exact residues in float32, float64
ROOM = 2.0**-4  # error of a decoded integer before it is rounded
Floats = NDArray[np.floating[Any]]


@compiled
def _quantise(values: F32, scale: float, largest: float, nearest: bool, whole: Floats) -> int:
    """Cut-off integers, and how many were cut off; numbers beyond the values are 0."""
    if nearest:
        for i in range(values.size):
            whole[i] = np.rint(np.float64(values[i]) * scale)
    else:
        for i in range(values.size):
            whole[i] = np.trunc(np.float64(values[i]) * scale)
    whole[values.size :] = 0
    high = whole.dtype.type(largest)
    low = -high
    cut = 0
    for i in range(values.size):
        x = whole[i]
        cut += int(not abs(x) <= high)
        x = x if x < high else high
        whole[i] = x if x > low else low
    return cut


@compiled
def _finite(values: F32) -> bool:
    broken = 0
    for i in range(values.size):
        broken += int(not abs(values[i]) < np.inf)
    return broken == 0


@compiled
def _two_residues(whole: Floats, half: float, fields: I64, code: Floats) -> None:
    """Add two residues at their places in the part's numbers."""
    kind = whole.dtype.type
    a, b = kind(fields[0, 0]), kind(fields[1, 0])
    by_a, by_b = kind(1.0 / fields[0, 0]), kind(1.0 / fields[1, 0])
    to_a, to_b = kind(1 << fields[0, 3]), kind(1 << fields[1, 3])
    nudge = kind(half)
    for i in range(whole.size):
        x = whole[i]
        y = x + nudge
        code[i] += (x - np.floor(y * by_a) * a) * to_a + (x - np.floor(y * by_b) * b) * to_b


@compiled
def _integers(code: Floats, numbers: U32) -> None:
    """Of 24 bits in float32, of 32 in float64."""
    if code.itemsize == 4:
        for i in range(code.size):
            numbers[i] = np.uint32(np.int32(code[i]))
    else:
        for i in range(code.size):
            numbers[i] = np.uint32(np.int64(code[i]))


@compiled
def _encode(
    values: F32,
    count: int,
    scale: float,
    largest: float,
    nearest: bool,
    layout: I64,
    fields: I64,
    work: Floats,
    out: U32,
) -> int:
    """In floating point that is exact for these integers; `work` has room for two blocks of it."""
    numbers = np.empty(BLOCK, np.uint32)
    every = (count + ROWS - 1) // ROWS
    cut = 0
    for block in range((every + LANES - 1) // LANES):
        wide = min(LANES, every - block * LANES)
        size = wide * ROWS
        whole, code = work[0, :size], work[1, :size]
        taken = values[block * BLOCK : block * BLOCK + size]
        over = _quantise(taken, scale, largest, nearest, whole)
        if over and not _finite(taken):
            return -1
        cut += over
        start = 0
        for part in range(layout.shape[0]):
            bits = layout[part, 0]
            code[:] = 0
            for field in range(layout[part, 1], layout[part, 2], 2):
                _two_residues(whole, 0.5, fields[field : field + 2], code)
            _integers(code, numbers)
            first = start + block * LANES * bits
            pack_lanes(numbers, wide, bits, out[first : first + wide * bits])
            start += bits * every
    return cut


@compiled
def _pack(residues: Residues, layout: I64, fields: I64, out: U32) -> None:
    count = residues.shape[1]
    every = (count + ROWS - 1) // ROWS
    numbers = np.empty(BLOCK, np.uint32)
    for block in range((every + LANES - 1) // LANES):
        wide = min(LANES, every - block * LANES)
        start = 0
        for part in range(layout.shape[0]):
            bits = layout[part, 0]
            numbers[:] = 0
            for field in range(layout[part, 1], layout[part, 2]):
                row = residues[fields[field, 1], block * BLOCK : block * BLOCK + wide * ROWS]
                low, up = np.uint64(fields[field, 2]), np.uint32(fields[field, 3])
                mask = np.uint64((1 << fields[field, 4]) - 1)
                for i in range(row.size):
                    numbers[i] |= np.uint32((np.uint64(row[i]) >> low) & mask) << up
            first = start + block * LANES * bits
            pack_lanes(numbers, wide, bits, out[first : first + wide * bits])
            start += bits * every


@compiled
def _add(words: U32, layout: I64, fields: I64, sums: Residues) -> bool:
    count = sums.shape[1]
    every = (count + ROWS - 1) // ROWS
    numbers = np.empty(BLOCK, np.uint32)
    wrong = np.uint32(0)
    for block in range((every + LANES - 1) // LANES):
        wide = min(LANES, every - block * LANES)
        start = 0
        for part in range(layout.shape[0]):
            bits = layout[part, 0]
            first = start + block * LANES * bits
            unpack_lanes(words[first : first + wide * bits], wide, bits, numbers)
            for field in range(layout[part, 1], layout[part, 2]):
                row = sums[fields[field, 1], block * BLOCK : block * BLOCK + wide * ROWS]
                modulus, up, down = fields[field, 0], np.uint64(fields[field, 2]), np.uint32(fields[field, 3])
                mask = np.uint32((1 << fields[field, 4]) - 1)
                for i in range(row.size):
                    residue = (numbers[i] >> down) & mask
                    row[i] += np.uint64(residue) << up
                    wrong |= np.uint32(residue >= modulus)
            for i in range(min(count - block * BLOCK, BLOCK), wide * ROWS):
                wrong |= numbers[i]
            start += bits * every
    return bool(wrong == 0)


@compiled
def _valid(words: U32, layout: I64, fields: I64, every: int) -> bool:
    numbers = np.empty(BLOCK, np.uint32)
    wrong = np.uint32(0)
    for block in range((every + LANES - 1) // LANES):
        wide = min(LANES, every - block * LANES)
        start = 0
        for part in range(layout.shape[0]):
            bits = layout[part, 0]
            first = start + block * LANES * bits
            unpack_lanes(words[first : first + wide * bits], wide, bits, numbers)
            for field in range(layout[part, 1], layout[part, 2]):
                modulus, down, mask = (
                    fields[field, 0],
                    np.uint32(fields[field, 3]),
                    np.uint32((1 << fields[field, 4]) - 1),
                )
                for i in range(wide * ROWS):
                    wrong |= np.uint32(((numbers[i] >> down) & mask) >= modulus)
            start += bits * every
    return bool(wrong == 0)


@compiled
def _reduce(row: Residues, modulus: int) -> None:
    """For sums and moduli below 2^32."""
    by, m = 1.0 / modulus, np.float64(modulus)
    for i in range(row.size):
        x = np.float64(np.int64(row[i]))
        row[i] = np.uint32(np.int64(x - np.floor((x + 0.5) * by) * m))


@compiled
def _two_terms(numbers: U32, fields: I64, terms: F64, turns: F64) -> None:
    """Add two residues times their terms."""
    down_a, down_b = fields[0, 3], fields[1, 3]
    mask_a, mask_b = (1 << fields[0, 4]) - 1, (1 << fields[1, 4]) - 1
    a, b = terms[fields[0, 1]], terms[fields[1, 1]]
    for i in range(turns.size):
        number = np.int64(numbers[i])
        turns[i] += np.float64((number >> down_a) & mask_a) * a + np.float64((number >> down_b) & mask_b) * b


@compiled
def _finish(turns: F64, product: float, unit: float, top: F64, out: F32) -> None:
    """x from x / M up to whole turns; the largest |x| by place of a block."""
    for i in range(out.size):
        x = np.rint((turns[i] - np.rint(turns[i])) * product)
        size = abs(x)
        top[i] = size if size > top[i] else top[i]
        out[i] = np.float32(x * unit)


@compiled
def _decode(
    words: U32, count: int, layout: I64, fields: I64, terms: F64, product: float, unit: float, top: F64, out: F32
) -> None:
    every = (count + ROWS - 1) // ROWS
    numbers, turns = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.float64)
    for block in range((out.size + BLOCK - 1) // BLOCK):
        wide = min(LANES, every - block * LANES)
        turns[:] = 0
        start = 0
        for part in range(layout.shape[0]):
            bits = layout[part, 0]
            first = start + block * LANES * bits
            unpack_lanes(words[first : first + wide * bits], wide, bits, numbers)
            for field in range(layout[part, 1], layout[part, 2], 2):
                _two_terms(numbers, fields[field : field + 2], terms, turns[: wide * ROWS])
            start += bits * every
        _finish(turns, product, unit, top, out[block * BLOCK : (block + 1) * BLOCK])


@compiled
def _four_words(numbers: U32, fields: I64, terms: U32, total: U32) -> None:
    """Add four residues times their terms, modulo 2^32."""
    down_a, down_b = np.uint32(fields[0, 3]), np.uint32(fields[1, 3])
    down_c, down_d = np.uint32(fields[2, 3]), np.uint32(fields[3, 3])
    mask_a, mask_b = np.uint32((1 << fields[0, 4]) - 1), np.uint32((1 << fields[1, 4]) - 1)
    mask_c, mask_d = np.uint32((1 << fields[2, 4]) - 1), np.uint32((1 << fields[3, 4]) - 1)
    a, b, c, d = terms[fields[0, 1]], terms[fields[1, 1]], terms[fields[2, 1]], terms[fields[3, 1]]
    for i in range(total.size):
        n = numbers[i]
        first = w.add(
            w.multiply(w.both(w.right(n, down_a), mask_a), a), w.multiply(w.both(w.right(n, down_b), mask_b), b)
        )
        last = w.add(
            w.multiply(w.both(w.right(n, down_c), mask_c), c), w.multiply(w.both(w.right(n, down_d), mask_d), d)
        )
        total[i] = w.add(total[i], w.add(first, last))


@compiled
def _finish_words(total: U32, product: float, unit: float, top: F64, out: F32) -> None:
    """The centred remainder of integers below 2^31; the largest magnitude by place of a block."""
    turn = 1.0 / product
    for i in range(out.size):
        y = np.float64(np.int32(total[i]))
        x = y - np.rint(y * turn) * product
        size = abs(x)
        top[i] = size if size > top[i] else top[i]
        out[i] = np.float32(x * unit)


@compiled
def _decode_words(
    words: U32, count: int, layout: I64, fields: I64, terms: U32, product: float, unit: float, top: F64, out: F32
) -> None:
    """As `_decode`, where sum_j r_j c_j is below 2^31."""
    every = (count + ROWS - 1) // ROWS
    numbers, total = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    for block in range((out.size + BLOCK - 1) // BLOCK):
        wide = min(LANES, every - block * LANES)
        total[:] = 0
        start = 0
        for part in range(layout.shape[0]):
            bits = layout[part, 0]
            first = start + block * LANES * bits
            unpack_lanes(words[first : first + wide * bits], wide, bits, numbers)
            for field in range(layout[part, 1], layout[part, 3], 4):
                _four_words(numbers, fields[field : field + 4], terms, total[: wide * ROWS])
            start += bits * every
        _finish_words(total, product, unit, top, out[block * BLOCK : (block + 1) * BLOCK])


@compiled
def _combine(sums: Residues, terms: F64, product: float, unit: float, top: F64, out: F32) -> None:
    turns = np.empty(BLOCK, np.float64)
    for first in range(0, out.size, BLOCK):
        last = min(first + BLOCK, out.size)
        turns[:] = 0
        for row in range(sums.shape[0]):
            term = terms[row]
            for i in range(last - first):
                turns[i] += np.float64(np.int64(sums[row, first + i])) * term
        _finish(turns, product, unit, top, out[first:last])


def encode(
    values: F32, count: int, scale: float, largest: int, nearest: bool, moduli: tuple[int, ...], out: U32
) -> int:
    """Pack the residues of the scaled values, and of zeros up to `count`.

    Returns how many values were cut off; -1 if one is not finite, and then nothing is packed to the end.
    """
    if largest >= DOUBLE or max(moduli) > 2**ROWS:
        return residues_numpy.encode(values, count, scale, largest, nearest, moduli, out)
    single = largest < SINGLE and max(part.bits for part in parts(moduli)) <= SHARED
    work = np.empty((2, BLOCK), np.float32 if single else np.float64)
    return int(_encode(values, count, scale, largest, nearest, *layout_of(moduli), work, out))


def pack(residues: Residues, moduli: tuple[int, ...], out: U32) -> None:
    """Pack a row of residues per modulus; nothing checks that they are below it."""
    _pack(residues, *layout_of(moduli), out)


def add(words: U32, moduli: tuple[int, ...], sums: Residues) -> bool:
    """Add packed residues to sums that have room for them.

    Returns whether all of them are below their modulus, and what pads them is zero.
    """
    return bool(_add(words, *layout_of(moduli), sums))


def valid(words: U32, moduli: tuple[int, ...]) -> bool:
    """Whether all residues are below their modulus, also those that pad the last lanes."""
    return bool(_valid(words, *layout_of(moduli), words.size // bits_of(moduli)))


def reduce(sums: Residues, moduli: tuple[int, ...]) -> None:
    """Each row modulo its modulus, in place."""
    if sums.dtype != np.uint32 or max(moduli) >= 2**ROWS:
        residues_numpy.reduce(sums, moduli)
    else:
        for row, modulus in zip(sums, moduli, strict=True):
            _reduce(row, modulus)


def combine(sums: Residues, moduli: tuple[int, ...], most: int, unit: float, out: F32) -> float:
    """The centred integers of the sums' first columns, times `unit`; returns the largest magnitude of an integer.

    `most` is how many residues were added up.

    x / M = sum_j S_j (1 / M_j mod m_j) / m_j up to whole numbers, for M_j = M / m_j: the Chinese remainder theorem
    in fractions, which float64 has exactly enough of for products up to about 2^40.
    """
    if not _exact(moduli, most):
        return residues_numpy.combine(sums, moduli, most, unit, out)
    top = np.zeros(BLOCK)
    _combine(sums, _terms(moduli), float(math.prod(moduli)), unit, top, out)
    return float(top.max())


def decode(words: U32, count: int, moduli: tuple[int, ...], unit: float, out: F32) -> float:
    """The same from the packed residues of `count` integers; residues count modulo their modulus."""
    product = math.prod(moduli)
    top, terms = np.zeros(BLOCK), _words(moduli)
    if terms is not None:
        _decode_words(words, count, *layout_of(moduli), terms, float(product), unit, top, out)
        return float(top.max())
    if not _exact(moduli, 2) or max(moduli) > 2**ROWS:
        return residues_numpy.decode(words, count, moduli, unit, out)
    _decode(words, count, *layout_of(moduli), _terms(moduli), float(product), unit, top, out)
    return float(top.max())


@cache
def _words(moduli: tuple[int, ...]) -> U32 | None:
    """The terms of `whole` as 32-bit words, if a sum of residues times them is below 2^31."""
    product = math.prod(moduli)
    terms = [product // m * pow(product // m, -1, m) % product for m in moduli]
    small = sum(c * (m - 1) for c, m in zip(terms, moduli, strict=True)) < 2**31
    return np.array(terms, np.uint32) if small else None


@cache
def _terms(moduli: tuple[int, ...]) -> F64:
    product = math.prod(moduli)
    return np.array([pow(product // m, -1, m) / m for m in moduli])


def _exact(moduli: tuple[int, ...], most: int) -> bool:
    """Whether the error of x / M times M stays far below 1/2: each of the sum's operations adds up to 2^-53 of it."""
    turns = most * sum(moduli)
    if len(moduli) == 1 and not moduli[0] & (moduli[0] - 1):
        return turns < 2**53  # no operation is rounded
    return math.prod(moduli) * turns * (len(moduli) + 3) * 2.0**-53 < ROOM
