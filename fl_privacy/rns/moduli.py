"""Pairwise coprime moduli: the smallest that hold a sum of n integers of r digits, and those of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from fl_privacy.errors import FederationError

Moduli = tuple[int, ...]
LARGEST_PRODUCT = 2**256  # of moduli: far above any number of sites and digits that a config allows


def least(n: int, r: int) -> int:
    """The smallest product that holds every sum of n integers of r digits, with its sign (Proposition 3.1)."""
    return least_for(n, 10**r - 1)


def least_for(n: int, largest: int) -> int:
    """The same for integers from -largest to largest."""
    if n < 1 or largest < 1:
        raise FederationError(f"moduli: for {n} integers up to {largest}; both must be at least 1")
    return 2 * n * largest + 1


def optimal(least: int, spare: int = 1) -> Moduli:
    """Moduli with a product of at least `least` and the smallest possible sum of m - spare.

    A residue takes m - 1 bits in unary (spare 1); as published, m (spare 0). Only powers of primes can be in an optimal
    set, at most one of each prime: if m = ab with coprime a and b >= 2, then a and b in its place have the same product
    and a smaller sum, because ab - (a + b) = (a - 1)(b - 1) - 1 >= 1, and with spare 1 they save one more. So it is a
    knapsack over primes: the largest product for every sum, as exact integers.
    """
    _check(least, spare)
    bound = sum(m - spare for m in primes(least))
    best: list[tuple[int, Moduli]] = [(1, ())] * (bound + 1)  # by sum: the largest product, and its moduli
    for prime in _primes():
        if prime - spare > bound:
            break
        before = list(best)
        power = prime
        while power - spare <= bound:
            for total in range(power - spare, bound + 1):
                product, chosen = before[total - (power - spare)]
                if product * power > best[total][0]:
                    best[total] = product * power, (*chosen, power)
            power *= prime
    return tuple(sorted(next(chosen for product, chosen in best if product >= least)))


def primes(least: int) -> Moduli:
    """The first primes with a product of at least `least`: what the paper's figures of bits are the sums of."""
    _check(least, 1)
    chosen: list[int] = []
    product = 1
    for prime in _primes():
        if product >= least:
            break
        chosen.append(prime)
        product *= prime
    return tuple(chosen)


def power_of_two(least: int) -> Moduli:
    """One modulus 2^w: plain fixed point, where residues save nothing."""
    _check(least, 1)
    return (1 << (least - 1).bit_length(),)


def _check(least: int, spare: int) -> None:
    if not 2 <= least <= LARGEST_PRODUCT:
        raise FederationError(f"moduli: a product of {least} is not supported; use 2 to 2^256")
    if spare not in (0, 1):
        raise FederationError(f"moduli: spare is {spare}; use 0 or 1")


def _primes() -> Iterator[int]:
    found: list[int] = []
    for number in count(2):
        if all(number % prime for prime in found):
            found.append(number)
            yield number
