"""Coordinate-wise rules that are robust to outliers (Yin et al. 2018): the same bits for every order of the rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine.mean import check_matrix
from fl_privacy.vector import Vector

PIECE = 2**16  # columns sorted at a time


def median(rows: NDArray[np.float32]) -> Vector:
    """The middle value of every column, or the mean of the two middle ones."""
    return _middle(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: NDArray[np.float32], fraction: float) -> Vector:
    """The mean of every column without the `fraction` largest and the `fraction` smallest of its values."""
    return _middle(rows, math.floor(fraction * len(rows)))


def _middle(rows: NDArray[np.float32], dropped: int) -> Vector:
    """The mean of every sorted column without `dropped` values at each end."""
    check_matrix(rows)
    out = np.empty(rows.shape[1], np.float32)
    for first in range(0, out.size, PIECE):
        part = np.sort(rows[:, first : first + PIECE], axis=0)[dropped : len(rows) - dropped]
        out[first : first + PIECE] = part.mean(axis=0, dtype=np.float64)
    return out
