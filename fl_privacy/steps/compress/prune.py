"""`compress: {kind: prune}`: small entries of every tensor of an update are set to 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from pydantic import Field

from fl_privacy.coding import Payload
from fl_privacy.steps.base import At, Running, Seat, Step
from fl_privacy.steps.compress.baseline import count_of, sparse_bytes
from fl_privacy.steps.compress.topk import top_k
from fl_privacy.vector import Vector


def pruned(update: Vector, keep: float, tensors: Iterable[slice]) -> Vector:
    """The update with the largest share `keep` of every tensor, at least one entry; the others are 0."""
    kept = np.zeros_like(update)
    for tensor in tensors:
        part = update[tensor]
        if part.size:
            kept[tensor] = top_k(part, count_of(keep, part.size))
    return kept


class Prune(Step):
    """Gradient pruning: keeps the largest entries of each tensor, so that no layer disappears.

    Travels as float32 (audits only); packed it would take 4 bytes and an index per kept entry.
    """

    kind: Literal["prune"] = "prune"
    keep: float = Field(0.3, gt=0, le=1, description="share of each tensor's entries that is kept")

    def start(self, seat: Seat) -> Running:
        return _Pruning(self.keep, list(seat.work.layout.slices.values()))

    def packed(self, parameters: int) -> int:
        """Without the rounding of each tensor's count."""
        return sparse_bytes(count_of(self.keep, parameters), parameters)


class _Pruning(Running):
    def __init__(self, keep: float, tensors: list[slice]) -> None:
        self._keep, self._tensors = keep, tensors

    def outward(self, update: Payload, at: At) -> Payload:
        return pruned(update, self._keep, self._tensors)
