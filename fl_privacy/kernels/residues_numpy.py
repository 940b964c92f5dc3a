"""Integers, residues and their packed bits in numpy: reference and fallback."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.kernels.arrays import F32, I64, U32
from fl_privacy.kernels.packed import BLOCK, LANES, ROWS, bits_of, lanes, planes

Residues = NDArray[np.unsignedinteger[Any]]  # uint32 or uint64, one row per modulus


def quantise(values: F32, scale: float, largest: int, nearest: bool) -> tuple[I64, int]:
    """Values as integers, and how many were cut off; those that are not numbers count as such."""
    scaled = values.astype(np.float64) * scale
    whole = np.rint(scaled) if nearest else np.trunc(scaled)
    cut = ~(np.abs(whole) < np.float64(largest + 1))  # `largest` itself may have no float64, as 10^18 - 1
    integers = np.where(cut, 0, whole).astype(np.int64)
    integers[cut] = np.where(whole[cut] > 0, largest, -largest)
    return integers, int(np.count_nonzero(cut))


def encode(
    values: F32, count: int, scale: float, largest: int, nearest: bool, moduli: tuple[int, ...], out: U32
) -> int:
    """Pack the residues of the scaled values, and of zeros up to `count`.

    Returns how many values were cut off; -1 if one is not finite, and then nothing is packed to the end.
    """
    if not np.isfinite(values).all():
        return -1
    integers = np.zeros(count, np.int64)
    integers[: values.size], cut = quantise(values, scale, largest, nearest)
    pack(np.stack([(integers % modulus).astype(np.uint64) for modulus in moduli]), moduli, out)
    return cut


def pack(residues: Residues, moduli: tuple[int, ...], out: U32) -> None:
    """Pack a row of residues per modulus; nothing checks that they are below it."""
    count, kind = residues.shape[1], residues.dtype.type
    for part, where in planes(moduli, count):
        numbers = np.zeros(lanes(count) * ROWS, np.uint32)
        for field in part.fields:
            bits = (residues[field.row] >> kind(field.first)) & kind(2**field.size - 1)
            numbers[:count] |= bits.astype(np.uint32) << np.uint32(field.shift)
        out[where] = _packed(numbers, part.bits)


def add(words: U32, moduli: tuple[int, ...], sums: Residues) -> bool:
    """Add packed residues to sums that have room for them.

    Returns whether all of them are below their modulus, and what pads them is zero.
    """
    count, kind, valid = sums.shape[1], sums.dtype.type, True
    for part, where in planes(moduli, count):
        numbers = _unpacked(words[where], part.bits)
        valid &= not numbers[count:].any()
        for field in part.fields:
            bits = (numbers[:count] >> np.uint32(field.shift)) & np.uint32(2**field.size - 1)
            sums[field.row] += bits.astype(kind) << kind(field.first)
            valid &= moduli[field.row] > 2**ROWS or bool((bits < moduli[field.row]).all())
    return bool(valid)


def valid(words: U32, moduli: tuple[int, ...]) -> bool:
    """Whether all residues are below their modulus, also those that pad the last lanes."""
    count = words.size // bits_of(moduli) * ROWS
    return add(words, moduli, np.zeros((len(moduli), count), np.uint64))


def reduce(sums: Residues, moduli: tuple[int, ...]) -> None:
    """Each row modulo its modulus, in place."""
    for row, modulus in zip(sums, moduli, strict=True):
        if modulus <= np.iinfo(row.dtype).max:  # otherwise all its numbers are below it
            row %= row.dtype.type(modulus)


def combine(sums: Residues, moduli: tuple[int, ...], most: int, unit: float, out: F32) -> float:
    """The centred integers of the sums' first columns, times `unit`; returns the largest magnitude of an integer.

    `most` is how many residues were added up.
    """
    integers = whole(sums[:, : out.size], moduli)
    out[:] = integers.astype(np.float64) * unit
    return float(np.abs(integers).max(initial=0))


def decode(words: U32, count: int, moduli: tuple[int, ...], unit: float, out: F32) -> float:
    """The same from the packed residues of `count` integers; residues count modulo their modulus."""
    sums = np.zeros((len(moduli), count), np.uint64)
    add(words, moduli, sums)
    return combine(sums, moduli, 1, unit, out)


def whole(sums: Residues, moduli: tuple[int, ...]) -> NDArray[Any]:
    """The centred integers that have these residues: int64 if it holds all terms, otherwise Python's integers.

    x = sum_j S_j c_j mod M, where c_j is 1 modulo m_j and 0 modulo the others (Chinese remainder theorem).
    """
    product = math.prod(moduli)
    terms = [product // m * pow(product // m, -1, m) % product for m in moduli]
    kind = np.int64 if sum(c * (m - 1) for c, m in zip(terms, moduli, strict=True)) < 2**63 else object
    total: NDArray[Any] = np.zeros(sums.shape[1], kind)
    for row, modulus, term in zip(sums, moduli, terms, strict=True):
        total += (row.astype(np.uint64) % np.uint64(modulus)).astype(kind) * term
    total %= product
    return np.where(total > (product - 1) // 2, total - product, total)


def _packed(numbers: U32, bits: int) -> U32:
    """The words of numbers of so many bits."""
    whole = numbers.size - numbers.size % BLOCK
    blocks = numbers[:whole].reshape(-1, ROWS, LANES), _last(numbers[whole:], ROWS)
    return np.concatenate([_pack_lanes(block, bits).reshape(-1) for block in blocks])


def _unpacked(words: U32, bits: int) -> U32:
    """All numbers of so many bits in these words, with those that pad the last lanes."""
    whole = words.size - words.size % (bits * LANES)
    blocks = words[:whole].reshape(-1, bits, LANES), _last(words[whole:], bits)
    return np.concatenate([_unpack_lanes(block, bits).reshape(-1) for block in blocks])


def _last(rest: U32, rows: int) -> U32:
    return rest.reshape(1, rows, -1) if rest.size else rest.reshape(0, rows, LANES)


def _pack_lanes(numbers: U32, bits: int) -> U32:
    """Blocks of 32 rows of numbers as blocks of `bits` rows of words."""
    out = np.zeros((numbers.shape[0], bits, numbers.shape[2]), np.uint32)
    for row in range(ROWS):
        word, shift = divmod(row * bits, ROWS)
        out[:, word] |= numbers[:, row] << np.uint32(shift)
        if shift + bits > ROWS:
            out[:, word + 1] |= numbers[:, row] >> np.uint32(ROWS - shift)
    return out


def _unpack_lanes(words: U32, bits: int) -> U32:
    out = np.empty((words.shape[0], ROWS, words.shape[2]), np.uint32)
    for row in range(ROWS):
        word, shift = divmod(row * bits, ROWS)
        out[:, row] = words[:, word] >> np.uint32(shift)
        if shift + bits > ROWS:
            out[:, row] |= words[:, word + 1] << np.uint32(ROWS - shift)
    return out & np.uint32(2**bits - 1)
