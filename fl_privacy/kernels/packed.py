"""Where the residues of packed integers are: in parts, of which each is a plane of numbers with the same few bits.

A part has the residues of as many moduli as fit into 24 bits, side by side; a residue of more bits has a part of its
own, and one of more than 32 bits (modulo a power of two) has two. The numbers of a plane lie in blocks of 4096, so that
a processor can work on many at once. A block has 128 lanes (the last one as few as it needs) of 32 numbers: number s of
lane l is at place s * lanes + l, and the 32 b bits of a lane are b words, of which word k is at place k * lanes + l.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

LANES = 128
ROWS = 32  # numbers of a lane, and bits of a word
BLOCK = LANES * ROWS
SHARED = 24  # bits of a part with several residues: float32 is exact for such integers


@dataclass(frozen=True)
class Field:
    """Bits of a residue: `size` of them from bit `first` are at bit `shift` of a part's numbers."""

    row: int  # which modulus
    first: int
    shift: int
    size: int


@dataclass(frozen=True)
class Part:
    """A plane of numbers, and what they consist of."""

    fields: tuple[Field, ...]

    @property
    def bits(self) -> int:
        return sum(field.size for field in self.fields)


def lanes(count: int) -> int:
    """Lanes of so many numbers: each takes one word per bit."""
    return -(-count // ROWS)


@cache
def parts(moduli: tuple[int, ...]) -> tuple[Part, ...]:
    """The parts of the residues for these moduli, in order."""
    found: list[list[Field]] = []
    for row, modulus in enumerate(moduli):
        size = (modulus - 1).bit_length()
        used = sum(field.size for field in found[-1]) if found else SHARED
        if used + size <= SHARED:
            found[-1].append(Field(row, 0, used, size))
        else:
            found += [[Field(row, first, 0, min(ROWS, size - first))] for first in range(0, size, ROWS)]
    return tuple(Part(tuple(fields)) for fields in found)


def bits_of(moduli: tuple[int, ...]) -> int:
    """Bits of an integer's residues."""
    return sum((modulus - 1).bit_length() for modulus in moduli)


def planes(moduli: tuple[int, ...], count: int) -> Iterator[tuple[Part, slice]]:
    """Each part and its words, for so many integers."""
    start, wide = 0, lanes(count)
    for part in parts(moduli):
        yield part, slice(start, start + part.bits * wide)
        start += part.bits * wide


def places(moduli: tuple[int, ...], count: int, column: int) -> Iterator[tuple[Field, list[tuple[int, int]]]]:
    """Every field of one integer, and its bits: places of words, and which of a word's bits is the field's bit 0.

    Where a field crosses two words, the second has a negative one.
    """
    block, place = divmod(column, BLOCK)
    whole = count // BLOCK
    wide = LANES if block < whole else lanes(count) - whole * LANES
    row, lane = divmod(place, wide)
    for part, where in planes(moduli, count):
        base = where.start + block * LANES * part.bits + lane
        for field in part.fields:
            word, shift = divmod(row * part.bits + field.shift, ROWS)
            crossing = [(base + (word + 1) * wide, shift - ROWS)] if shift + field.size > ROWS else []
            yield field, [(base + word * wide, shift), *crossing]
