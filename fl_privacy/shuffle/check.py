"""Argument checks common to all shuffles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.shuffle.draws import MAX_ROWS

Matrix = NDArray[np.float32]  # one row per client, one column per coordinate


def check_matrix(matrix: Matrix) -> None:
    """Raise unless the matrix can be shuffled in place: float32, one row per client, contiguous and writable."""
    check_shape(matrix)
    if matrix.dtype != np.float32:
        raise FederationError(f"matrix: dtype {matrix.dtype} is not float32; convert the updates first")


def check_shape(matrix: NDArray[Any]) -> None:
    """Raise unless the matrix has one row per client, is contiguous and writable; any dtype."""
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
        shape = getattr(matrix, "shape", type(matrix).__name__)
        raise FederationError(f"matrix: {shape} is not two-dimensional; pass one row per client")
    if not matrix.flags.c_contiguous:
        raise FederationError("matrix: not C-contiguous; pass numpy.ascontiguousarray(matrix)")
    if not matrix.flags.writeable:
        raise FederationError("matrix: read-only; pass a writable copy, because it is shuffled in place")
    if matrix.shape[0] > MAX_ROWS:
        raise FederationError(
            f"matrix: {matrix.shape[0]} rows, at most {MAX_ROWS} can be shuffled; use smaller buckets"
        )
