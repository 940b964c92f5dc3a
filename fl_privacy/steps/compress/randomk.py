"""`compress: {kind: random-k}`: a random part of an update leaves the site, scaled up."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fl_privacy.shard.subset import subset
from fl_privacy.steps.compress.baseline import Baseline, count_of
from fl_privacy.vector import Vector

SEED_BYTES = 32


def random_k(update: Vector, count: int, key: bytes) -> Vector:
    """`count` entries drawn without replacement, times d/k: unbiased, with omega = d/k - 1."""
    kept = np.zeros_like(update)
    chosen = subset(update.size, count, key)
    kept[chosen] = update[chosen] * np.float32(update.size / count)
    return kept


class RandomK(Baseline):
    """Keeps a random share of the update, drawn again in every round. Unbiased.

    Travels as float32 (audits only); packed it would take 4 bytes per kept entry and the seed of the draw.
    """

    kind: Literal["random-k"] = "random-k"
    keep: float = Field(0.1, gt=0, le=1, description="share of the entries that is kept")

    @property
    def kept(self) -> float:
        return self.keep

    def compressed(self, update: Vector, key: bytes) -> Vector:
        return random_k(update, count_of(self.keep, update.size), key)

    def packed(self, parameters: int) -> int:
        return 4 * count_of(self.keep, parameters) + SEED_BYTES
