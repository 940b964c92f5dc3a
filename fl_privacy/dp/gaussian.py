"""The analytic Gaussian mechanism (Balle and Wang 2018): exact calibration for every epsilon.

scipy is imported where it is used: it takes 40 MB, which a site that adds no noise does not need.
"""

from __future__ import annotations

import math

from fl_privacy.errors import FederationError

LARGEST_EPSILON = 1e3
SMALLEST_DELTA = 1e-30
SLACK = 1e-10  # relative; above the rounding errors of `sigma` and `epsilon` together


def delta(sigma: float, epsilon: float) -> float:
    """Smallest delta for noise sigma at sensitivity 1 (Balle and Wang, Theorem 8).

    Phi(1/(2 sigma) - epsilon sigma) - e^epsilon Phi(-1/(2 sigma) - epsilon sigma), computed in logarithms: e^epsilon
    overflows long before the product does.
    """
    from scipy.special import log_ndtr

    first = log_ndtr(1 / (2 * sigma) - epsilon * sigma)
    second = epsilon + log_ndtr(-1 / (2 * sigma) - epsilon * sigma)
    return max(0.0, float(math.exp(first) * -math.expm1(min(0.0, second - first))))


def sigma(epsilon: float, delta: float) -> float:
    """Smallest noise for (epsilon, delta) at sensitivity 1, rounded up so that `epsilon` of it is not above `epsilon`.

    >>> round(sigma(1.0, 1e-5), 4)
    3.7306
    """
    from scipy.optimize import brentq

    check(epsilon, delta)
    low = high = 1.0 / epsilon
    while _delta(high, epsilon) > delta:
        high *= 2
    while _delta(low, epsilon) <= delta:
        low /= 2
    found = brentq(lambda s: _delta(s, epsilon) - delta, low, high, xtol=1e-12 * low, rtol=1e-13)
    return float(found) * (1 + SLACK)


def epsilon(sigma: float, delta: float) -> float:
    """Smallest epsilon for noise sigma at sensitivity 1."""
    from scipy.optimize import brentq

    if _delta(sigma, 0.0) <= delta:
        return 0.0
    high = LARGEST_EPSILON
    while _delta(sigma, high) > delta:
        high *= 2
    return float(brentq(lambda e: _delta(sigma, e) - delta, 0.0, high, xtol=1e-300, rtol=1e-13))


_delta = delta


def check(epsilon: float, delta: float) -> None:
    """Raise unless (epsilon, delta) is a valid budget."""
    if not (isinstance(epsilon, int | float) and 0 < epsilon <= LARGEST_EPSILON):
        raise FederationError(f"epsilon: {epsilon!r} is not a number above 0 and at most {LARGEST_EPSILON:g}")
    if not (isinstance(delta, int | float) and SMALLEST_DELTA <= delta < 1):
        raise FederationError(f"delta: {delta!r} is not a number from {SMALLEST_DELTA:g} to below 1; use 1e-5")
