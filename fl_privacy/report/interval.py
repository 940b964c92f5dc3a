"""The mean over a few runs and its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half of its 95 % confidence interval (Student's t); one value has no interval."""
    if not values:
        raise ValueError("no values to average")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))
