"""`compress: {kind: qsgd}`: entries are rounded at random to a few levels (Alistarh et al. 2017)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.steps.compress.baseline import FLOAT_BITS, Baseline, uniforms
from fl_privacy.vector import Vector

Array = NDArray[np.float64]


def quantised(update: Vector, levels: int, key: bytes) -> Vector:
    """Each entry as |v| sign(v_i) l/s with l of 0 to s, rounded up with the probability that makes it unbiased."""
    exact = update.astype(np.float64)
    norm = math.sqrt(float(exact @ exact))
    return levelled(exact, norm, levels, uniforms(update.size, key)).astype(np.float32)


def levelled(exact: Array, top: float, levels: int, draws: Array) -> Array:
    """Each entry as one of `levels` + 1 even levels up to `top`, with its sign: rounded at random, unbiased."""
    if not top > 0:
        return exact
    share = np.abs(exact) * (levels / top)
    level = np.floor(share)
    level += draws < share - level
    return np.copysign(level, exact) * (top / levels)


class Qsgd(Baseline):
    """Stochastic quantisation relative to the update's norm. Unbiased.

    Travels as float32 (audits only); packed it would take a sign and a level per entry, and the norm.
    """

    kind: Literal["qsgd"] = "qsgd"
    levels: int = Field(16, ge=1, le=2**16, description="levels above 0")

    def compressed(self, update: Vector, key: bytes) -> Vector:
        return quantised(update, self.levels, key)

    def packed(self, parameters: int) -> int:
        return -(-(FLOAT_BITS + parameters * (1 + self.levels.bit_length())) // 8)
