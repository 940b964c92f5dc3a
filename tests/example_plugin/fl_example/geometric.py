"""The point with the smallest sum of distances to all updates (Pillutla et al. 2022)."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.combine.rules import Rule


class Weiszfeld(Rule):
    """model + lr * the geometric median of the updates, by Weiszfeld's algorithm."""

    kind: Literal["weiszfeld"] = "weiszfeld"
    iterations: int = Field(10, ge=1, le=1000)

    needs_rows: ClassVar[bool] = True  # a sum of the updates is not enough
    coordinatewise: ClassVar[bool] = False  # nor is a shard of each
    weighable: ClassVar[bool] = False

    def aggregate(self, rows, shares, exact):
        if exact:  # the bits of a sum depend on the order of its terms
            rows = rows[sorted(range(len(rows)), key=lambda row: rows[row].tobytes())]
        centre = rows.mean(axis=0)
        for _ in range(self.iterations):
            closeness = 1 / np.maximum(np.linalg.norm(rows - centre, axis=1), 1e-6)
            centre = closeness @ rows / closeness.sum()
        return centre.astype(np.float32)
