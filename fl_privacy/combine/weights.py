"""The weight of an update by its privacy label (IntraShuffler, Equation 2): noisier updates count less."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_privacy.dp import gaussian

Weights = NDArray[np.float64]


def equal(epsilons: Sequence[float], delta: float) -> Weights:
    """Every update the same."""
    return np.ones(len(epsilons))


def by_epsilon(epsilons: Sequence[float], delta: float) -> Weights:
    """In proportion to the budget."""
    return np.asarray(epsilons, np.float64)


def by_precision(epsilons: Sequence[float], delta: float) -> Weights:
    """In inverse proportion to the noise's variance: this gives the least noisy mean."""
    sigmas = {epsilon: gaussian.sigma(epsilon, delta) for epsilon in set(epsilons)}
    return np.array([sigmas[epsilon] ** -2 for epsilon in epsilons])


Weighting = Callable[[Sequence[float], float], Weights]
RULES: dict[str, Weighting] = {"equal": equal, "epsilon": by_epsilon, "precision": by_precision}
