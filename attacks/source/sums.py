"""Single updates from nothing but their sums, if the cohorts of several rounds differ and are known.

A site's update is taken to have a part that stays the same from round to round, in units of the round's mean update.
Least squares finds the parts: the mean update of every round is that of the parts of its cohort.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]
NEGLIGIBLE = 1e-6  # of the largest singular value
TINY = float(np.finfo(np.float32).tiny)


def disaggregated(means: Sequence[Vector], cohorts: Sequence[Sequence[int]], sites: int) -> Matrix:
    """The constant part of every site's update, relative to the length of the round's mean; least norm if many fit."""
    members = np.zeros((len(means), sites))
    for row, cohort in zip(members, cohorts, strict=True):
        row[list(cohort)] = 1 / len(cohort)
    units = np.stack([mean / max(length(mean), TINY) for mean in means])
    return np.asarray(np.linalg.pinv(members, rcond=NEGLIGIBLE) @ units, np.float32)


def length(update: Vector) -> float:
    return float(np.linalg.norm(update.astype(np.float64)))
