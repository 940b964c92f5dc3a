"""The check of a mix's sum: it must agree with what the sites sent, under a challenge that nobody could foresee.

A share of d numbers modulo m carries t more, uniform mask numbers u_1 to u_t. Challenge c is a random subset R_c of
the d places. After all mixes have signed their sums, a site answers for each of its shares s

    y_c = sum over j in R_c of s_j + u_c  (mod m),

and the sum S of a mix passes if for all c the answers of its sites add up to the same expression of S.

Soundness. Let D = S - sum of the shares, fixed before the subsets are drawn. If some D_j is not 0 mod m, fix whether
all other places are in R_c: of the two cases for j, which are equally likely and differ by D_j, at most one passes. If
only mask numbers differ, a challenge whose mask differs fails. So a sum that is wrong at any place passes t challenges
with probability at most 2^-t, for every modulus, also where it has small factors or zero divisors: no multiplication
is involved. Each modulus is checked by itself, and one wrong residue is enough to fail.

Nothing is revealed. u_c is uniform, independent of the share, and used once: y_c is uniform whatever s is. The answers
of all sites add up to what S shows anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_privacy import kernels
from fl_privacy.crypto import sealing
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.mix.shares import Residues, expanded

CHALLENGES = 40  # a wrong sum passes with probability 2^-40
MOST = 64  # one bit of a word per place each
BLOCK = 1 << 16  # places at a time
BITS = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint64)  # of every byte
Answers = NDArray[np.uint64]  # one row per modulus, one number per challenge
DOMAIN = "fl-privacy mixes challenge 1"


def seed_of(attempt: str, sums: Sequence[bytes], nonces: Iterable[bytes]) -> bytes:
    """The challenge's seed, from what every mix signed and what every site had committed to and then opened."""
    return hashlib.sha256(sealing.fields(DOMAIN, attempt, *sums, *nonces)).digest()


def masked(residues: Residues, moduli: Sequence[int], key: bytes, challenges: int = CHALLENGES) -> Residues:
    """Residues with their mask numbers, to be split into shares. The masks of all shares together are uniform too:
    otherwise the answers for all shares would add up to the sum over a subset of the values themselves."""
    return np.concatenate([residues, expanded([key], moduli, challenges).astype(residues.dtype)], axis=1)


def answers(residues: Residues, moduli: Sequence[int], seed: bytes, challenges: int = CHALLENGES) -> Answers:
    """y_c of a share, or of a sum, for every modulus; the last `challenges` numbers of each row are the masks."""
    size = residues.shape[1] - challenges
    if not 1 <= challenges <= MOST or size < 0:
        raise FederationError(f"challenges: {challenges} for {residues.shape[1]} numbers, between 1 and {MOST} needed")
    stream, kernel = Words(seed), kernels.pick("subsets", size)
    sums = np.zeros((len(residues), -(-challenges // 8), 256), np.uint64)
    for start in range(0, size, BLOCK):
        part = residues[:, start : min(start + BLOCK, size)]
        words = stream.take(part.shape[1] + part.shape[1] % 2)[: part.shape[1]]
        for row, table in zip(part, sums, strict=True):
            kernel.by_byte(row, words, table)
    found = [_chosen(table, row[size:], m) for table, row, m in zip(sums, residues, moduli, strict=True)]
    return np.array(found, np.uint64)


def passes(claimed: Answers, of_sites: Iterable[Answers], moduli: Sequence[int]) -> bool:
    """Whether a sum's own answers are those of its sites together."""
    return bool(np.array_equal(claimed, total(of_sites, moduli)))


def total(of_sites: Iterable[Answers], moduli: Sequence[int]) -> Answers:
    """The sum of answers, modulo each modulus."""
    listed = [one.astype(object) for one in of_sites]
    if not listed:
        raise FederationError("answers: none to add")
    column = np.array([int(m) for m in moduli], object)[:, None]
    found: NDArray[np.uint64] = (np.sum(listed, axis=0) % column).astype(np.uint64)
    return found


def _chosen(table: NDArray[np.uint64], masks: Residues, m: int) -> list[int]:
    """Each mask plus the sum of the numbers whose word has bit c, modulo m. The table is exact modulo 2^64: m divides
    that, or is so small that nothing wrapped."""
    sums = (table @ BITS).reshape(-1)
    return [(int(mask) + int(one)) % int(m) for mask, one in zip(masks, sums, strict=False)]
