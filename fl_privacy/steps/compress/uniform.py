"""`compress: {kind: uniform}`: entries are rounded to evenly spaced levels."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fl_privacy.steps.compress.baseline import FLOAT_BITS, Baseline
from fl_privacy.vector import Vector


def rounded(update: Vector, bits: int) -> Vector:
    """Each entry as the nearest of 2^bits levels from the smallest entry to the largest."""
    exact = update.astype(np.float64)
    low, high = float(exact.min()), float(exact.max())
    if not high > low:
        return update
    step = (high - low) / (2**bits - 1)
    found: Vector = (low + np.rint((exact - low) / step) * step).astype(np.float32)
    return found


class Uniform(Baseline):
    """Uniform quantisation between the update's smallest and largest entry. Biased; no randomness.

    Travels as float32 (audits only); packed it would take `bits` per entry and two numbers.
    """

    kind: Literal["uniform"] = "uniform"
    bits: int = Field(4, ge=1, le=16)

    def compressed(self, update: Vector, key: bytes) -> Vector:
        return rounded(update, self.bits)

    def packed(self, parameters: int) -> int:
        return -(-(2 * FLOAT_BITS + self.bits * parameters) // 8)
