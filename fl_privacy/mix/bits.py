"""The bits of residues in unary, one message for each, and their sums from messages of all sites in any order.

A residue v modulo m is m - 1 bits, of which v are set (Athanasiou et al. 2026, Algorithm 1; its m-th bit is never set).
Whoever gets all bits counts them: these are the sums of the residues as integers, the published form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import require
from fl_privacy.rns.residues import Residues

SIZE = 8  # bytes of a message
_KIND = np.dtype([("column", "<u4"), ("modulus", "<u2"), ("bit", "u1"), ("zero", "u1")])
Messages = NDArray[np.uint8]  # [count, SIZE]


def per_column(moduli: Sequence[int]) -> int:
    """Messages of one integer."""
    return sum(m - 1 for m in moduli)


def spread(residues: Residues, moduli: Sequence[int]) -> Messages:
    """A message for every bit of these residues, [moduli, columns], in order."""
    found = [_of_modulus(row, index, m) for index, (row, m) in enumerate(zip(residues, moduli, strict=True))]
    return np.concatenate(found).view(np.uint8).reshape(-1, SIZE)


def _of_modulus(row: NDArray[Any], index: int, modulus: int) -> NDArray[Any]:
    out = np.zeros((row.size, modulus - 1), _KIND)
    out["column"], out["modulus"] = np.arange(row.size)[:, None], index
    out["bit"] = np.arange(modulus - 1)[None, :] < row[:, None]
    return out.reshape(-1)


def without(messages: Messages, dummy: bytes, count: int) -> Messages:
    """The messages that are none of the dummies, of which there must be so many."""
    odd = (messages == np.frombuffer(dummy, np.uint8)).all(axis=1)
    found = int(odd.sum())
    require(found == count, f"bits: {found} dummies arrived of {count}", "DATA_LOSS")
    kept: Messages = messages[~odd]
    return kept


def counted(messages: Messages, moduli: Sequence[int], columns: int, sites: int) -> Residues:
    """How many bits are set, [moduli, columns]: the sums of so many sites' residues.

    Refuses anything but every bit of every residue of every site: a mix that drops, doubles or replaces messages
    without knowing what they say changes how many there are of a residue.
    """
    whole = messages.dtype == np.uint8 and messages.shape == (sites * columns * per_column(moduli), SIZE)
    require(whole, f"bits: {messages.shape} is not every bit of {sites} sites", "DATA_LOSS")
    found = np.ascontiguousarray(messages).view(_KIND).reshape(-1)
    known = bool((found["column"] < columns).all() and (found["modulus"] < len(moduli)).all())
    require(known and bool((found["bit"] <= 1).all()) and not found["zero"].any(), "bits: one is of no residue")
    place = found["modulus"].astype(np.int64) * columns + found["column"]
    there = np.bincount(place, minlength=len(moduli) * columns).reshape(len(moduli), columns)
    wanted = sites * (np.array(moduli)[:, None] - 1)
    wrong = int((there != wanted).sum())
    require(not wrong, f"bits: {wrong} residues have too many or too few; a mix or a site altered some", "DATA_LOSS")
    sums = np.bincount(place, weights=found["bit"], minlength=len(moduli) * columns)
    return sums.astype(np.uint64).reshape(len(moduli), columns)
