"""What correct guesses about canaries say about epsilon (Steinke, Nasr and Jagielski 2023: auditing with one run).

Assumed: every canary was included by its own fair coin, and guesses depend on nothing but the mechanism's output. The
bound is on (epsilon, delta)-DP under adding or removing one record.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit
from scipy.stats import binom

LARGEST = 100.0  # above it, guesses are certain in floating point
PRECISION = 1e-4


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The probability, at most, of so many right guesses against an (epsilon, delta)-DP mechanism (Theorem 5.2).

    >>> round(p_value(100, 100, 75, 1.0986, 0.0), 2)
    0.55
    """
    accuracy = float(expit(epsilon))  # of a guess at a randomised response
    reached = float(binom.sf(right - 1, guesses, accuracy))
    if not delta or not right:
        return min(1.0, reached)
    missed_by = np.arange(1, right + 1)
    nearly = np.cumsum(binom.pmf(right - missed_by, guesses, accuracy))
    return min(1.0, reached + 2 * canaries * delta * float((nearly / missed_by).max()))


def epsilon_lower(canaries: int, guesses: int, right: int, delta: float, level: float) -> float:
    """The largest epsilon that so many right guesses refute at this level (Corollary 5.4); 0 if they refute none.

    >>> round(epsilon_lower(1000, 100, 75, 1e-4, 0.05), 3)
    0.673
    """
    low, high = 0.0, LARGEST
    if p_value(canaries, guesses, right, low, delta) >= level:
        return 0.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        if p_value(canaries, guesses, right, middle, delta) < level:
            low = middle
        else:
            high = middle
    return low
