"""Tests on pairs: a bootstrap of differences, Holm's correction for several of them, and two one-sided tests (TOST)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, its percentile interval over resampled pairs, and the two-sided p-value of a mean of zero."""

    mean: float
    low: float
    high: float
    p: float


def bootstrap(values: Sequence[float] | Array, seed: int, resamples: int = RESAMPLES) -> Interval:
    """Of the mean of these values (differences of pairs, say)."""
    given = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = given[rng.integers(0, len(given), (resamples, len(given)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # The sample itself counts as one resample, so that p is never 0.
    tails = [(1 + np.count_nonzero(side)) / (resamples + 1) for side in (means <= 0, means >= 0)]
    return Interval(float(given.mean()), float(low), float(high), float(min(1.0, 2 * min(tails))))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values: the family-wise error rate is held, whatever the tests have to do with each other.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    found, largest = dict[str, float](), 0.0
    for at, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - at) * p[name]))
        found[name] = largest
    return found


@dataclass(frozen=True)
class Paired:
    """Differences of pairs: their mean, the mean of their size, half the 95 % interval, and both tests."""

    n: int
    mean: float
    absolute: float
    half: float
    t_p: float  # of a mean of zero
    tost_p: float  # of a mean outside the margin: small values show equivalence


def equivalence(differences: Sequence[float] | Array, margin: float) -> Paired:
    """TOST and the paired t-test (Table II). Without any variation the mean itself decides."""
    from scipy import stats

    given = np.asarray(differences, np.float64)
    if len(given) < 2:
        raise ValueError(f"differences: {len(given)} given; both tests need two pairs or more")
    if not margin > 0:
        raise ValueError(f"margin: {margin:g} is not positive")
    n, mean, error = len(given), float(given.mean()), float(given.std(ddof=1) / np.sqrt(len(given)))
    size = float(np.abs(given).mean())
    if error == 0:
        return Paired(n, mean, size, 0.0, float(mean == 0), float(abs(mean) >= margin))
    student = stats.t(n - 1)
    tost = max(float(student.sf((mean + margin) / error)), float(student.cdf((mean - margin) / error)))
    half = float(student.ppf((1 + LEVEL) / 2) * error)
    return Paired(n, mean, size, half, float(2 * student.sf(abs(mean) / error)), tost)
