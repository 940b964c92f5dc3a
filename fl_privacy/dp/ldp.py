"""Local differential privacy for a whole update: clip to C, add Gaussian noise 2 C sigma (IntraShuffler, Equation 1).

Two data sets of a site may differ in every record (adjacency: replacement), so two clipped updates may differ by 2 C.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fl_privacy.dp import gaussian
from fl_privacy.dp.ledger import Charge
from fl_privacy.dp.noise import standard_normal

Vector = NDArray[np.float32]
UNIT, ADJACENCY = "site", "replace"
TINY = float(np.finfo(np.float32).tiny)  # smaller float32 numbers have fewer digits


def clip(update: Vector, bound: float) -> Vector:
    """The update, scaled down to norm `bound` if its norm is larger; 0 if its norm is so large that training diverged.

    A factor that small is imprecise in float32, and the norm of the result could be twice the bound.
    """
    norm = math.sqrt(float(np.dot(update.astype(np.float64), update)))
    # Rounded down slightly: the norm of the float32 result must not exceed the bound.
    factor = 1.0 if norm <= bound else bound / norm * (1 - 1e-6)
    if factor < TINY:
        return np.zeros_like(update)
    return update if norm <= bound else update * np.float32(factor)


def sigma(epsilon: float, delta: float, rounds: int = 1) -> float:
    """Noise relative to the sensitivity in each of `rounds` rounds that spend epsilon together.

    Gaussians compose exactly: n of them are one with sigma / sqrt(n).
    """
    return gaussian.sigma(epsilon, delta) * math.sqrt(rounds)


def scale(bound: float, epsilon: float, delta: float, rounds: int = 1) -> float:
    """Standard deviation of the noise on every coordinate."""
    return 2 * bound * sigma(epsilon, delta, rounds)


def charge(epsilon: float, delta: float, rounds: int = 1) -> Charge:
    """The privacy cost of one update."""
    return Charge(sigma(epsilon, delta, rounds), UNIT, ADJACENCY)


def privatise(update: Vector, bound: float, epsilon: float, delta: float, key: bytes, rounds: int = 1) -> Vector:
    """Clip, then add noise from a CSPRNG with the single-use key `key`."""
    noise = standard_normal(update.size, key)
    noise *= np.float32(scale(bound, epsilon, delta, rounds))
    noise += clip(update, bound)
    return noise


def missing(bound: float, epsilon: float, weakest: float, delta: float, rounds: int = 1) -> float:
    """Standard deviation that tops up the noise of `epsilon` to that of the smaller budget `weakest`."""
    most, own = (scale(bound, budget, delta, rounds) for budget in (weakest, epsilon))
    return math.sqrt(max(0.0, most**2 - own**2))
