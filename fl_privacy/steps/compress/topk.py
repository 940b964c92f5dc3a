"""`compress: {kind: top-k}`: only the largest entries of an update leave the site."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fl_privacy.steps.compress.baseline import Baseline, count_of, largest, sparse_bytes
from fl_privacy.vector import Vector


def top_k(update: Vector, count: int) -> Vector:
    """The `count` entries of the largest magnitude; the others are 0."""
    return np.where(largest(update, count), update, np.float32(0))


class TopK(Baseline):
    """Keeps the largest entries of the whole update. Biased; which entries are kept depends on the data.

    Travels as float32 (audits only); packed it would take 4 bytes and an index per kept entry.
    """

    kind: Literal["top-k"] = "top-k"
    keep: float = Field(0.1, gt=0, le=1, description="share of the entries that is kept")

    def compressed(self, update: Vector, key: bytes) -> Vector:
        return top_k(update, count_of(self.keep, update.size))

    def packed(self, parameters: int) -> int:
        return sparse_bytes(count_of(self.keep, parameters), parameters)
