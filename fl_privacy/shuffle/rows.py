"""Reorder whole rows in place with little extra memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.shuffle.check import check_shape

Matrix = NDArray[Any]
BUFFER_ENTRIES = 2**20  # 4 MiB of float32


def reorder(matrix: Matrix, order: Sequence[int] | NDArray[np.integer]) -> Matrix:
    """`matrix[:len(order)] = matrix[order]` for distinct rows, in place; returns these rows as a view."""
    check_shape(matrix)
    index = np.asarray(order, dtype=np.int64)
    rows = matrix.shape[0]
    if index.ndim != 1 or np.any((index < 0) | (index >= rows)) or len(np.unique(index)) != index.size:
        raise FederationError(f"order: must name distinct rows from 0 to {rows - 1}")
    gather(matrix, index, slice(0, matrix.shape[1]))
    return matrix[: index.size]


def gather(matrix: Matrix, order: NDArray[np.int64], columns: slice) -> None:
    """Move rows `order` of these columns to the top, through a buffer of a few MiB."""
    if np.array_equal(order, np.arange(order.size)):
        return
    width = max(1, BUFFER_ENTRIES // order.size)
    for first in range(columns.start, columns.stop, width):
        last = min(first + width, columns.stop)
        matrix[: order.size, first:last] = matrix[order, first:last]
