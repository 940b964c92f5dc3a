"""How an update travels: numbers of one type, so many for a model of d parameters, and what is checked of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    `per_parameter` to 0 and overrides `length`; shuffles by parameter and shards are then refused.
    """

    name: str
    dtype: str = "<f4"
    per_parameter: int = 1

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

    def stored(self, rows: Payload) -> dict[str, Payload]:
        """Received rows as the arrays of a transcript: exactly what was received."""
        return {"updates": rows}


FLOAT32 = Coding("float32")
