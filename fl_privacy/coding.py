"""How an update travels: numbers of one type, so many for a model of d parameters, and what is checked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import ProtocolError

Payload = NDArray[Any]  # an update as it travels, or one row of such updates for each client
MAX_PARAMETERS = 2**31
BLOCK = 1 << 18  # elements checked at a time


@dataclass(frozen=True)
class Coding:
    """Updates as numbers of `dtype`, little-endian; `per_parameter` of them for every parameter.

    A coding whose numbers do not belong to single parameters (packed bits, sparse values, ciphertext) sets
    `per_parameter` to 0 and overrides `length`; shuffles by parameter and shards are then refused. One whose payload is
    made for every part of an update apart sets `by_part`: it can be split over the receivers of the parts.
    """

    name: str
    dtype: str = "<f4"
    per_parameter: int = 1
    by_part: bool = False

    @cached_property
    def type(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    def length(self, parameters: int) -> int:
        """Numbers in an update of so many parameters."""
        return self.per_parameter * parameters

    def nbytes(self, parameters: int) -> int:
        return self.length(parameters) * self.type.itemsize

    def check(self, payload: Payload) -> None:
        """Refuse a received payload with values that no honest sender has."""
        if not np.issubdtype(self.type, np.floating):
            return
        flat = payload.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            if not np.isfinite(flat[start : start + BLOCK]).all():
                raise ProtocolError("INVALID_ARGUMENT", "data: not finite")

    def decode(self, rows: Payload, parameters: int) -> NDArray[np.float32]:
        """Received rows as updates, one row of float32 per client, for whoever combines them."""
        return rows.astype(np.float32, copy=False)

    def decoder(self, parameters: int) -> Decoder:
        """What a receiver that keeps state decodes the updates of a run with."""
        return Decoder(self, parameters)

    def stored(self, rows: Payload) -> dict[str, Payload]:
        """Received rows as the arrays of a transcript: exactly what was received."""
        return {"updates": rows}


class Known(NamedTuple):
    """What one message reveals of an update: its values at the coordinates `where`, or at all of them.

    `bare` is what arrived there, without what the receiver has from earlier rounds.
    """

    values: NDArray[np.float32]
    where: NDArray[np.int64] | None = None
    bare: NDArray[np.float32] | None = None


class Decoder:
    """Turns received rows into updates. This one needs nothing of earlier rounds."""

    def __init__(self, coding: Coding, parameters: int) -> None:
        self._coding, self._parameters = coding, parameters

    def held(self, site: str) -> bytes:
        """What the site's next update can build on, in a form that says nothing of it to others."""
        return b""

    def check(self, site: str, row: Payload) -> None:
        """Refuse a payload of this site that cannot be decoded."""

    def decode(self, rows: Payload, sites: Sequence[str], round: int) -> NDArray[np.float32]:
        """The updates of these sites, one row each, and the state after this round."""
        return self._coding.decode(rows, self._parameters)

    def known(self, rows: Payload, sites: Sequence[str], round: int) -> list[Known]:
        """As `decode`, for a receiver that wants to know these updates, and not only their mean."""
        return [Known(update) for update in self.decode(rows, sites, round)]

    def state(self) -> Mapping[str, NDArray[Any]]:
        """What the next round needs from this one; it is saved with the model. Decoding another round may change it."""
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the state after a round; it is empty before the first."""


FLOAT32 = Coding("float32")
