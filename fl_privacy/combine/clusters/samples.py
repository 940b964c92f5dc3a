"""Validation samples: what a site sends beside its update, for the server to try all models on.

Every coordinate of a sample is drawn by itself from the same distribution, and never from a record. So a sample says
nothing of anybody's data, and the same sample with its coordinates in another order is as likely: models whose input
dimensions are permuted can be tried on it as it stands, and it gives no hint of the permutation. A public sample beside
its permuted form would give the permutation away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.dp.noise import standard_normal
from fl_privacy.errors import ProtocolError
from fl_privacy.steps.base import At, Seat

LARGEST = 5.0  # of a coordinate, in standard deviations; draws beyond it (6 in 10^7) are clipped
PURPOSE = "validation samples"


def key(seat: Seat, at: At) -> bytes:
    """Where the samples of a site come from. Whoever agrees on a secret among sites derives it from that instead."""
    return seat.key(at, PURPOSE)


def draw(key: bytes, numbers: int) -> NDArray[np.float32]:
    """So many independent coordinates, standard normal."""
    out = np.empty(numbers, np.float32)
    standard_normal(numbers, key, out=out)
    return np.clip(out, -LARGEST, LARGEST, out=out)


@dataclass(frozen=True)
class WithSamples(Coding):
    """An update as it would travel anyhow, and `extra` numbers of samples behind it."""

    inner: Coding = FLOAT32
    extra: int = 0

    def length(self, parameters: int) -> int:
        return self.inner.length(parameters) + self.extra

    def check(self, payload: Payload) -> None:
        super().check(payload)
        if (np.abs(self.samples(payload)) > LARGEST).any():
            raise ProtocolError("INVALID_ARGUMENT", f"samples: beyond {LARGEST:g}, which no honest sample is")

    def decode(self, rows: Payload, parameters: int) -> NDArray[np.float32]:
        return self.inner.decode(np.ascontiguousarray(rows[:, : self.inner.length(parameters)]), parameters)

    def samples(self, rows: Payload) -> NDArray[np.float32]:
        """The samples of one row or of many."""
        return np.asarray(rows[..., rows.shape[-1] - self.extra :], np.float32)

    def stored(self, rows: Payload) -> dict[str, Payload]:
        updates = np.ascontiguousarray(rows[:, : rows.shape[1] - self.extra])
        return {**self.inner.stored(updates), "samples": np.ascontiguousarray(self.samples(rows))}
