"""What sums of residues tell beyond the sum itself (Athanasiou et al. 2026, Algorithm 1), in bits.

Algorithm 1 releases, per modulus, the shuffled bits of all residues in unary. Whoever sees them knows how many are set,
S_j = sum_i (x_i mod m_j), and nothing else: all orders of the bits with the same number set are equally likely,
whatever the residues are. So a trusted shuffler that gives away S_j as a number shows exactly as much as one that
shuffles bits, and fewer bytes. But S_j is an integer: it says how often the residues wrapped around m_j, which their
sum does not. Reduced modulo m_j, all S_j together are the sum's residues: the carry-safe form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.rns.moduli import Moduli
from fl_privacy.rns.residues import check_moduli

MOST = 5_000_000  # sets of inputs to enumerate
MANY = 500  # terms of a sum
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Leak:
    """Entropy of n independent uniform inputs in bits, before and after a release; and how often it tells them all.

    `known_...` is the probability that the release fits only one set of inputs, up to their order.
    """

    inputs: float
    given_sum: float
    given_published: float
    given_carry_safe: float
    known_from_sum: float
    known_from_published: float
    known_from_carry_safe: float


def leak(n: int, values: Sequence[int], moduli: Moduli) -> Leak:
    """Exactly, by enumeration of all inputs: n of them, each one of `values`."""
    given = np.array(sorted(values), dtype=np.int64)
    if n < 1 or given.size < 1 or len(set(given.tolist())) != given.size:
        raise FederationError(f"leak: {n} inputs with {given.size} values; needs at least one of each, all different")
    check_moduli(moduli)
    if (count := math.comb(given.size + n - 1, n)) > MOST:
        raise FederationError(f"leak: {count:.3g} sets of inputs are too many to enumerate; use posterior()")
    chosen = np.array(list(itertools.combinations_with_replacement(range(given.size), n)), np.int64)
    orders = _orders(chosen, n)
    sums = np.stack([(given % m)[chosen].sum(axis=1) for m in moduli])
    released = given[chosen].sum(axis=1)[None], sums, sums % np.array(moduli)[:, None]
    found = [_given(release, orders) for release in released]
    entropies, known = zip(*found, strict=True)
    return Leak(n * math.log2(given.size), *entropies, *known)


def _orders(chosen: NDArray[np.int64], n: int) -> Array:
    """In how many orders each sorted set of inputs can occur: n! over the factorials of its repetitions."""
    run, divisor = np.ones(len(chosen)), np.ones(len(chosen))
    for i in range(1, n):
        run = np.where(chosen[:, i] == chosen[:, i - 1], run + 1, 1)
        divisor *= run
    return math.factorial(n) / divisor


def _given(release: NDArray[np.int64], orders: Array) -> tuple[float, float]:
    """Entropy of the inputs given a release, and the probability that only one set of inputs has it."""
    _, group, sets = np.unique(release, axis=1, return_inverse=True, return_counts=True)
    weights = np.bincount(group.reshape(-1), orders)
    total = math.fsum(orders)
    # Exactly rounded, so that two releases that divide the inputs alike give equal numbers.
    return math.fsum(weights * np.log2(weights)) / total, math.fsum(weights[sets == 1]) / total


@dataclass(frozen=True)
class Beyond:
    """Bits per parameter that unreduced sums tell beyond the sum: about all values together, and about one of them."""

    together: float
    single: float


def beyond(n: int, moduli: Moduli) -> Beyond:
    """For any n and moduli, if residues are uniform and independent, as those of values that spread over many moduli.

    S_j tells H(S_j) bits and S_j mod m_j tells log2 m_j of them; of one residue among n it tells
    H(S_j) - H(S_j without it), and S_j mod m_j nothing. Distributions of sums are convolutions, by FFT.
    """
    if n == 1:
        return Beyond(0.0, 0.0)
    of_all = [_entropy_of_sum(n, m) for m in moduli]
    of_others = [_entropy_of_sum(n - 1, m) for m in moduli]
    return Beyond(
        sum(of_all) - sum(math.log2(m) for m in moduli), sum(a - b for a, b in zip(of_all, of_others, strict=True))
    )


def sum_of_residues(n: int, residue: Array) -> Array:
    """The distribution of the sum of n independent residues with this distribution."""
    size = n * (residue.size - 1) + 1
    room = 1 << (size - 1).bit_length()
    found = np.fft.irfft(np.fft.rfft(residue, room) ** n, room)[:size]
    clean = np.maximum(found, 0.0)
    return np.asarray(clean / clean.sum())


def _entropy_of_sum(n: int, modulus: int) -> float:
    """In bits; of many residues as of a Gaussian variable, which is off by less than 1e-5 there."""
    if n > MANY:
        return 0.5 * math.log2(2 * math.pi * math.e * n * (modulus**2 - 1) / 12)
    spread = sum_of_residues(n, np.full(modulus, 1 / modulus))
    positive = spread[spread > 0]
    return float(-(positive @ np.log2(positive)))
