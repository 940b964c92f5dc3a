"""Local differential privacy of a whole update: clipped to C, Gaussian noise 2 C sigma (IntraShuffler, Equation 1).

Two data sets of a site may differ in everything (adjacency: replacement), so two clipped updates may differ by 2 C.
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


def clip(update: Vector, bound: float) -> Vector:
    """The update, shortened to norm `bound` if it is longer."""
    norm = math.sqrt(float(np.dot(update.astype(np.float64), update)))
    # Rounded down a little: the float32 result must not be longer than the bound.
    return update if norm <= bound else update * np.float32(bound / norm * (1 - 1e-6))


def scale(bound: float, epsilon: float, delta: float) -> float:
    """Standard deviation of the noise on every coordinate."""
    return 2 * bound * gaussian.sigma(epsilon, delta)


def charge(epsilon: float, delta: float) -> Charge:
    """What one such update costs."""
    return Charge(gaussian.sigma(epsilon, delta), UNIT, ADJACENCY)


def privatise(update: Vector, bound: float, epsilon: float, delta: float, key: bytes) -> Vector:
    """Clip, then add noise from a CSPRNG keyed by `key`, which is used once."""
    noise = standard_normal(update.size, key)
    noise *= np.float32(scale(bound, epsilon, delta))
    noise += clip(update, bound)
    return noise


def missing(bound: float, epsilon: float, weakest: float, delta: float) -> float:
    """Standard deviation of what brings noise of `epsilon` to that of the smaller budget `weakest`."""
    return math.sqrt(max(0.0, scale(bound, weakest, delta) ** 2 - scale(bound, epsilon, delta) ** 2))
