"""How an update is split over its receivers, and how a model is joined from its parts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import Payload
from fl_privacy.vector import Vector

Ints = NDArray[np.int64]


class Parts(Protocol):
    """How an update is split over its receivers, and how a model is joined from its parts."""

    def at(self, round: int) -> Parts:
        """As it is done in a round; the model after one is joined as in the next."""

    def split(self, payload: Payload) -> list[Payload]: ...

    def join(self, models: list[Vector]) -> Vector: ...

    def digest(self, digests: list[bytes]) -> bytes: ...

    def coordinates(self, party: str) -> Ints | None:
        """Those of an update that reach a party in this round; None for all of them."""


class Whole:
    """One receiver gets the whole update and sends the whole model."""

    def at(self, round: int) -> Whole:
        return self

    def split(self, payload: Payload) -> list[Payload]:
        return [payload]

    def join(self, models: list[Vector]) -> Vector:
        return models[0]

    def digest(self, digests: list[bytes]) -> bytes:
        return digests[0]

    def coordinates(self, party: str) -> Ints | None:
        return None
