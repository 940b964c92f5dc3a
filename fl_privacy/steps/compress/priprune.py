"""`compress: {kind: priprune}`: the largest entries of an update stay at the site (Chu et al. 2024)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fl_privacy.steps.compress.baseline import Baseline, largest, sparse_bytes
from fl_privacy.vector import Vector


def withheld(update: Vector, count: int) -> Vector:
    """The update without its `count` largest entries, which are 0."""
    return np.where(largest(update, count), np.float32(0), update)


class PriPrune(Baseline):
    """PriPrune's defence mask as in ERIS's comparison: withholds the entries that tell most, the largest ones.

    Left out: its base pruning, the adaptive rate, and training that continues from the withheld weights.
    Travels as float32 (audits only); packed it would take 4 bytes per sent entry and a bit mask.
    """

    kind: Literal["priprune"] = "priprune"
    rate: float = Field(0.1, gt=0, lt=1, description="share of the entries that is withheld")

    def compressed(self, update: Vector, key: bytes) -> Vector:
        return withheld(update, round(self.rate * update.size))

    def packed(self, parameters: int) -> int:
        sent = parameters - round(self.rate * parameters)
        return min(sparse_bytes(sent, parameters), 4 * sent + -(-parameters // 8))
