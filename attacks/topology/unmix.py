"""Unmixing by variance: what a shuffle of parameters leaves of a site whose noise differs from the others'.

At a coordinate the observer sees the values of all members of a bucket in no order. With one deviation for all, each
is anybody's, and every site's estimate is their mean. With known and unequal deviations, the posterior is not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Array = NDArray[np.float64]
SWEEPS = 20  # of Sinkhorn's balancing: every value has one owner, and every owner one value
CHUNK = 4096  # coordinates at once
EQUAL = 1.0 + 1e-6


def unmixed(rows: Matrix, deviations: Array) -> Matrix:
    """The expected update of every member: one row each, in the order of the deviations."""
    if len(rows) != len(deviations) or deviations.min() <= 0 or deviations.max() / deviations.min() < EQUAL:
        return np.tile(rows.mean(axis=0), (len(deviations), 1))
    found = np.empty((len(deviations), rows.shape[1]), np.float32)
    for first in range(0, rows.shape[1], CHUNK):
        values = rows[:, first : first + CHUNK].astype(np.float64)
        centred = values - np.average(values, axis=0)
        scaled = centred[None] / deviations[:, None, None]
        likely = np.exp(-0.5 * np.minimum(scaled**2, 200.0)) / deviations[:, None, None] + 1e-300
        for _ in range(SWEEPS):
            likely /= likely.sum(axis=0, keepdims=True)
            likely /= likely.sum(axis=1, keepdims=True)
        found[:, first : first + CHUNK] = (likely * values[None]).sum(axis=1)
    return found
