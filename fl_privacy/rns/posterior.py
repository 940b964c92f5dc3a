"""What unreduced sums of residues tell about one site's value, at real sizes: a posterior, and the bits it gains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.rns.meter import sum_of_residues
from fl_privacy.rns.moduli import Moduli
from fl_privacy.rns.residues import decode

Array = NDArray[np.float64]
TINY = 1e-300


def posterior(
    sums: NDArray[np.unsignedinteger], n: int, prior: Array, moduli: Moduli, *, reduced: bool | Sequence[bool] = False
) -> Array:
    """For each column of residue sums, the distribution of one of the n values, from -largest to largest.

    `prior` is the distribution of each value, of odd length. With T the sum of the other values and R_j that of their
    residues, P(a | S) is proportional to prior(a) P(T = X - a) prod_j P(R_j = S_j - a mod m_j) / P(R_j = T mod m_j):
    exact for n = 2, and for more as far as the residues of the others are independent given T. With `reduced` only
    the sum X is used, which is all that the carry-safe form tells; it may say so for each modulus apart.
    """
    if prior.size % 2 == 0 or not np.isclose(prior.sum(), 1) or n < 2:
        raise FederationError("posterior: needs n >= 2, and a prior of odd length that sums to 1")
    largest = prior.size // 2
    values = np.arange(-largest, largest + 1)
    others = _sum_of_values(n - 1, prior)
    rest = decode(sums, moduli).astype(np.int64)[:, None] - values
    middle = (n - 1) * largest
    inside = np.abs(rest) <= middle
    found: Array = prior * np.where(inside, others[np.clip(rest + middle, 0, others.size - 1)], 0.0)
    told = [reduced] * len(moduli) if isinstance(reduced, bool) else reduced
    for row, modulus in [(r, m) for r, m, less in zip(sums, moduli, told, strict=True) if not less]:
        found *= _likelihood(
            row.astype(np.int64), n, np.bincount(values % modulus, prior, modulus).astype(np.float64), values
        )
    total = found.sum(axis=1, keepdims=True)
    return np.asarray(np.where(total > 0, found / np.maximum(total, TINY), prior))


def _likelihood(sums: NDArray[np.int64], n: int, residue: Array, values: NDArray[np.int64]) -> Array:
    """P(R = S - a mod m) over P(R = S - a modulo m), for every sum and value a."""
    modulus = residue.size
    spread = sum_of_residues(n - 1, residue) if n > 2 else residue
    folded = np.bincount(np.arange(spread.size) % modulus, spread, modulus)
    ratio = np.zeros((sums.size, modulus))
    for own in range(modulus):
        rest = sums - own
        inside = (rest >= 0) & (rest < spread.size)
        ratio[:, own] = np.where(inside, spread[np.clip(rest, 0, spread.size - 1)], 0.0)
        ratio[:, own] /= np.maximum(folded[rest % modulus], TINY)
    return ratio[:, values % modulus]


def _sum_of_values(n: int, prior: Array) -> Array:
    return prior if n == 1 else sum_of_residues(n, prior)


def bits(found: Array, values: NDArray[np.int64]) -> float:
    """Mean surprise of the true values in bits. For any posterior it is at least their entropy given the release."""
    largest = found.shape[1] // 2
    hit = found[np.arange(values.size), values + largest]
    return float(-np.log2(np.maximum(hit, TINY)).mean())
