"""Read and write a vector at some places, in numpy: reference and fallback."""

from __future__ import annotations

from fl_privacy.kernels.arrays import F32, I64


def take(vector: F32, at: I64) -> F32:
    """The values at these places."""
    return vector[at]


def put(vector: F32, at: I64, values: F32) -> None:
    """Write the values at these places."""
    vector[at] = values
