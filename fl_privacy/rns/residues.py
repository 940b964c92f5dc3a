"""Residues of integers, packed to the bits they need, and the integer that belongs to summed residues.

Sums of residues decode to the sum of the integers by the Chinese remainder theorem, as long as the product of the
moduli holds it (`moduli.least`): whether each sum was reduced modulo its modulus does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.errors import FederationError, ProtocolError, require
from fl_privacy.kernels import residues_numpy
from fl_privacy.kernels.arrays import U32
from fl_privacy.kernels.packed import ROWS, bits_of, lanes, places
from fl_privacy.rns.integers import Integers
from fl_privacy.rns.moduli import Moduli
from fl_privacy.vector import Vector

Residues = NDArray[np.unsignedinteger[Any]]  # uint32 or uint64, a row per modulus
KERNELS = "residues"
INT64 = 2**63


def check_moduli(moduli: Sequence[int]) -> None:
    """Refuse moduli that integers cannot be decoded from."""
    for place, modulus in enumerate(moduli):
        wide = modulus > 2**ROWS and modulus & (modulus - 1)
        if not 2 <= modulus <= INT64 or wide or any(math.gcd(modulus, other) > 1 for other in moduli[:place]):
            why = "must be coprime to the others, and 2 to 2^32 or a power of two up to 2^63"
            raise FederationError(f"moduli: {modulus} {why}")
    if not moduli:
        raise FederationError("moduli: none; at least one is needed")


def unary_bits(moduli: Moduli) -> int:
    """Bits of an integer's residues in unary, at m - 1 for each: the last bit of the published m is never set."""
    return sum(modulus - 1 for modulus in moduli)


def words(moduli: Moduli, count: int) -> int:
    """32-bit words of so many packed integers."""
    return bits_of(moduli) * lanes(count)


def width(moduli: Moduli, terms: int) -> type[np.uint32] | type[np.uint64]:
    """The numbers that hold a sum of so many residues."""
    top = terms * (max(moduli) - 1)
    if top >= 2**64:
        raise FederationError(f"moduli: a sum of {terms} residues below {max(moduli)} needs more than 64 bits; lower r")
    return np.uint32 if top < 2**32 else np.uint64


def encode(
    values: Vector,
    integers: Integers,
    bound: float,
    moduli: Moduli,
    *,
    extra: int = 0,
    out: U32 | None = None,
    backend: str | None = None,
) -> tuple[U32, int]:
    """The packed residues of values as integers, then of `extra` zeros; and how many values were cut off."""
    count = values.size + extra
    out = np.empty(words(moduli, count), np.uint32) if out is None else out
    scaling = integers.scale(bound), integers.largest, integers.nearest
    cut = kernels.pick(KERNELS, count, backend).encode(values, count, *scaling, moduli, out)
    if cut < 0:
        raise FederationError("update: not finite, so it has no residues; lower task.train.lr")
    return out, cut


def put(packed: U32, moduli: Moduli, count: int, column: int, integer: int) -> None:
    """Write an integer's residues to a column that is zero."""
    for field, bits in places(moduli, count, column):
        value = (integer % moduli[field.row] >> field.first) & (2**field.size - 1)
        for place, shift in bits:
            packed[place] |= np.uint32((value << shift if shift >= 0 else value >> -shift) & (2**ROWS - 1))


def get(packed: U32, moduli: Moduli, count: int, column: int) -> Residues:
    """The residues of one column, as [moduli, 1]."""
    found = np.zeros((len(moduli), 1), np.uint64)
    for field, bits in places(moduli, count, column):
        value = sum(
            int(packed[place]) >> shift if shift >= 0 else int(packed[place]) << -shift for place, shift in bits
        )
        found[field.row] |= np.uint64((value & (2**field.size - 1)) << field.first)
    return found


def of(integers: NDArray[np.int64], moduli: Moduli) -> Residues:
    """x mod m, from 0 to m - 1 also for negative x (the paper's m - |x| mod m gives m for multiples of m)."""
    kind = width(moduli, 1)
    return np.stack([(integers % modulus).astype(kind) for modulus in moduli])


def pack(residues: Residues, moduli: Moduli, *, backend: str | None = None) -> U32:
    """Residues as they travel."""
    over = residues.shape[0] != len(moduli) or any(
        bool((row >= modulus).any()) for row, modulus in zip(residues, moduli, strict=True)
    )
    if over:
        raise FederationError("residues: not one row for each modulus, all below it")
    out = np.empty(words(moduli, residues.shape[1]), np.uint32)
    kernels.pick(KERNELS, residues.shape[1], backend).pack(residues, moduli, out)
    return out


def unpack(packed: U32, moduli: Moduli, count: int, *, backend: str | None = None) -> Residues:
    """The residues of so many integers; refuses any that is not below its modulus."""
    return add([packed], moduli, count, reduced=False, backend=backend)


def check(packed: U32, moduli: Moduli, *, backend: str | None = None) -> None:
    """Refuse packed residues that are not below their modulus."""
    sized = packed.dtype == np.uint32 and packed.ndim == 1 and packed.size % bits_of(moduli) == 0
    require(sized, f"data: {packed.size} numbers are not packed residues of {bits_of(moduli)} bits")
    if any(modulus & (modulus - 1) for modulus in moduli):
        require(kernels.pick(KERNELS, packed.size, backend).valid(packed, moduli), REFUSED)


def add(
    rows: Sequence[U32] | U32, moduli: Moduli, count: int, *, reduced: bool, backend: str | None = None
) -> Residues:
    """The sum of packed residues, as integers or modulo each modulus; refuses residues that are not below theirs."""
    sums = np.zeros((len(moduli), count), width(moduli, max(1, len(rows))))
    kernel = kernels.pick(KERNELS, count, backend)
    for row in rows:
        check_length(row, moduli, count)
        require(kernel.add(row, moduli, sums), REFUSED)
    if reduced:
        kernel.reduce(sums, moduli)
    return sums


REFUSED = "data: a residue is not below its modulus, or what pads them is not zero"


def check_length(packed: U32, moduli: Moduli, count: int) -> None:
    fits = packed.dtype == np.uint32 and packed.shape == (words(moduli, count),)
    require(fits, f"data: {packed.size} numbers are not the residues of {count} integers, packed")


def check_padding(packed: U32, moduli: Moduli, count: int) -> None:
    """Refuse packed residues of so many integers with anything behind the last one."""
    check_length(packed, moduli, count)
    for column in range(count, lanes(count) * ROWS):
        require(not get(packed, moduli, count, column).any(), REFUSED)


def decode(sums: Residues, moduli: Moduli) -> NDArray[Any]:
    """The integers around 0 that have these residues: int64, or Python's integers if their product needs it."""
    integers = residues_numpy.whole(sums, moduli)
    return integers.astype(np.int64) if math.prod(moduli) < INT64 else integers


def check_terms(sums: Residues, moduli: Moduli, terms: int) -> None:
    """Refuse sums that so many residues cannot have."""
    over = any(int(row.max(initial=0)) > terms * (modulus - 1) for row, modulus in zip(sums, moduli, strict=True))
    require(not over, f"data: a sum of {terms} residues is larger than these can be")


def scaled(
    sums: Residues, moduli: Moduli, terms: int, unit: float, most: int, out: Vector, *, backend: str | None = None
) -> None:
    """Decode the first columns of sums of so many residues, times `unit`.

    Refuses what no honest terms sum to: beyond `terms` residues, or an integer beyond `most`.
    """
    check_terms(sums, moduli, terms)
    kernel = kernels.pick(KERNELS, sums.shape[1], backend)
    check_sum(kernel.combine(sums, moduli, terms, unit, out), most)


def scaled_packed(
    packed: U32, moduli: Moduli, count: int, unit: float, most: int, out: Vector, *, backend: str | None = None
) -> None:
    """The same from packed residues of `count` integers."""
    check_length(packed, moduli, count)
    kernel = kernels.pick(KERNELS, count, backend)
    check_sum(kernel.decode(packed, count, moduli, unit, out), most)


def check_sum(largest: float, most: int) -> None:
    """Refuse a sum beyond what honest terms have."""
    if not largest <= most:
        raise ProtocolError("INVALID_ARGUMENT", f"data: decodes to a sum beyond {most}; a residue was altered")
