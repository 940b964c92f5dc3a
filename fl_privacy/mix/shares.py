"""Additive shares of residues, one per mix: any set of them but all is uniform noise.

A value has one residue per modulus. All shares but one are seeds, which the mix expands: a site uploads its data once.
The moduli are taken in groups of product P <= 2^24. A uniform number below P is a uniform residue of every modulus in
the group (Chinese remainder theorem), and is drawn from a 32-bit word w as floor(w P / 2^32). Words whose low half
w P mod 2^32 is below 2^32 mod P are drawn again, so every number has exactly floor(2^32 / P) words: no bias at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.crypto import keys
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError, require

Residues = NDArray[np.unsignedinteger]  # one row per modulus
LARGEST = 2**24  # of a modulus that is no power of two, and of a group's product
MOST = 16  # mixes
BLOCK = 1 << 17  # numbers drawn at a time


class Group(NamedTuple):
    """Moduli from `first` on whose residues come from the same words."""

    first: int
    moduli: tuple[int, ...]
    product: int

    @property
    def is_power(self) -> bool:
        """Whether it is one power of two: its numbers are the lower bits of a word."""
        return len(self.moduli) == 1 and self.product & (self.product - 1) == 0

    @property
    def bits(self) -> int:
        """Of a word of the stream."""
        return 64 if self.product > 2**32 else 32


@lru_cache
def groups(moduli: tuple[int, ...]) -> tuple[Group, ...]:
    """Neighbouring moduli whose product is at most 2^24; a larger power of two has a group of its own."""
    found: list[Group] = []
    for index, m in enumerate(moduli):
        power = m & (m - 1) == 0
        if not 2 <= m <= (2**64 if power else LARGEST):
            raise FederationError(f"moduli: {m} is not between 2 and 2^24, nor a power of two up to 2^64")
        last = found[-1] if found else None
        if last is not None and last.product * m <= LARGEST:
            found[-1] = Group(last.first, (*last.moduli, m), last.product * m)
        else:
            found.append(Group(index, (m,), m))
    return tuple(found)


def dtype_of(moduli: Sequence[int]) -> np.dtype[np.unsignedinteger]:
    """The type of residues modulo these."""
    most = max(moduli)
    kind = np.uint16 if most <= 2**16 else np.uint32 if most <= 2**32 else np.uint64
    return np.dtype(kind)


def split(residues: Residues, moduli: Sequence[int], parts: int, key: bytes) -> tuple[list[bytes], Residues]:
    """Seeds for all shares but one, and that one, which the residues minus the expanded seeds are.

    `key` is used for these residues alone.
    """
    if not 2 <= parts <= MOST:
        raise FederationError(f"mixes: {parts} shares, between 2 and {MOST} are possible")
    seeds = [keys.derive(key, "", 0, "", f"seed {part}") for part in range(parts - 1)]
    return seeds, _drawn(seeds, moduli, residues.shape[1], residues)


def expanded(seeds: Iterable[bytes], moduli: Sequence[int], count: int) -> Residues:
    """The sum of the shares that these seeds stand for."""
    return _drawn(list(seeds), moduli, count)


def _drawn(listed: Sequence[bytes], moduli: Sequence[int], count: int, whole: Residues | None = None) -> Residues:
    """The sum of the seeds' shares, or what is left of the whole without it."""
    moduli = tuple(int(m) for m in moduli)
    out = np.zeros((len(moduli), count), dtype_of(moduli))
    for number, group in enumerate(groups(moduli)):
        places = slice(group.first, group.first + len(group.moduli))
        rows, of = out[places], None if whole is None else whole[places]
        if group.is_power:
            _powers(listed, number, group, rows, of)
        else:
            _numbers(listed, number, group, rows, of)
    return out


def added(shares: Iterable[Residues], moduli: Sequence[int]) -> Residues:
    """The sum of shares."""
    total: Residues | None = None
    for share in shares:
        total = share.copy() if total is None else _sum(total, share, moduli)
    if total is None:
        raise FederationError("shares: none to add")
    return total


def check(residues: Residues, moduli: Sequence[int]) -> None:
    """Refuse what are no residues of these moduli."""
    require(residues.shape[0] == len(moduli), f"residues: {residues.shape[0]} rows for {len(moduli)} moduli")
    for row, m in zip(residues, moduli, strict=True):
        good = not row.size or int(row.max()) < m
        require(good, f"residues: not all below their modulus {m}")


def _sum(left: Residues, right: Residues, moduli: Sequence[int]) -> Residues:
    out = np.empty(left.shape, dtype_of(moduli))
    for one, other, row, m in zip(left, right, out, moduli, strict=True):
        kernels.pick("shares", one.size).combine(one, other.astype(out.dtype, copy=False), int(m), 1, row)
    return out


def _take_away(whole: Residues | None, part: slice, rows: Residues, moduli: Sequence[int]) -> None:
    """In these columns, replace what was drawn by what is left of the whole without it."""
    if whole is None:
        return
    kernel = kernels.pick("shares", rows.shape[1])
    for one, row, m in zip(whole, rows, moduli, strict=True):
        kernel.combine(one[part], row[part], int(m), -1, row[part])


def _powers(seeds: Sequence[bytes], number: int, group: Group, rows: Residues, whole: Residues | None) -> None:
    """Numbers modulo a power of two: the lower bits of the words."""
    word = np.dtype(f"<u{group.bits // 8}")
    mask = word.type(group.product - 1)
    streams = [Words(seed, 2 * number) for seed in seeds]
    for part in _blocks(rows.shape[1]):
        total = np.zeros(part.stop - part.start, word)
        for stream in streams:
            total += _words(stream, total.size, word)
        rows[0, part] = total & mask
        _take_away(whole, part, rows, group.moduli)


def _numbers(seeds: Sequence[bytes], number: int, group: Group, rows: Residues, whole: Residues | None) -> None:
    """Numbers below the group's product, and from these the residues of each of its moduli."""
    kernel = kernels.pick("shares", rows.shape[1])
    word, bound = np.dtype("<u4"), 2**32 % group.product
    pairs = [(Words(seed, 2 * number), _Again(seed, 2 * number + 1, group.product)) for seed in seeds]
    for part in _blocks(rows.shape[1]):
        total = np.zeros(part.stop - part.start, np.uint32)
        for stream, again in pairs:
            words = _words(stream, total.size, word)
            if kernel.absorb(words, group.product, bound, total):
                again.replace(words, bound, total)
        for row, m in zip(rows, group.moduli, strict=True):
            kernel.reduce(total, m, row[part])
        _take_away(whole, part, rows, group.moduli)


class _Again:
    """Draws again what was rejected, from a stream of its own."""

    def __init__(self, seed: bytes, stream: int, product: int) -> None:
        self._words, self._product = Words(seed, stream), product

    def replace(self, words: NDArray[np.uint32], bound: int, total: NDArray[np.uint32]) -> None:
        """Take back the numbers of rejected words, and add others."""
        scaled = words.astype(np.uint64) * np.uint64(self._product)
        for index in np.flatnonzero((scaled & np.uint64(2**32 - 1)) < bound):
            wrong = int(scaled[index]) >> 32
            total[index] = (int(total[index]) - wrong + self._number(bound)) % self._product

    def _number(self, bound: int) -> int:
        while True:
            scaled = (int(self._words.take(2)[0]) >> 32) * self._product
            if scaled & (2**32 - 1) >= bound:
                return scaled >> 32


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, BLOCK):
        yield slice(start, min(start + BLOCK, count))


def _words(stream: Words, count: int, word: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """The next words of this type; whole 16-byte blocks of the stream are used up."""
    per = 8 // word.itemsize
    whole = -(-count // (2 * per)) * 2
    return stream.take(whole).view(word)[:count]
