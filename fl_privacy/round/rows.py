"""Where a middleware keeps the updates of one attempt: rows of a matrix, dropped when the round ends."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import psutil

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.errors import require
from fl_privacy.shuffle import reorder


class Rows:
    """One row per client, written in place while its stream arrives.

    The rows are in an anonymous file in memory, `file`: a process that gets the descriptor can work on them in place.
    """

    def __init__(self, cohort: int, length: int, coding: Coding = FLOAT32) -> None:
        size = coding.type.itemsize * cohort * length
        fits = size <= psutil.virtual_memory().total
        require(fits, f"length: no memory for {cohort} updates of {length} numbers", "RESOURCE_EXHAUSTED")
        self.file = os.memfd_create("rows")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        self._matrix = mapped(self.file, cohort, length, coding.dtype)
        self._free = list(range(cohort))[::-1]
        self._slot: dict[str, int] = {}
        self._tier: dict[str, str] = {}
        self._records: dict[str, int] = {}

    def take(self, client: str) -> Payload:
        """The client's row: a new one, or the one that its superseded stream was filling."""
        if client not in self._slot:
            self._slot[client] = self._free.pop()
        row: Payload = self._matrix[self._slot[client]]
        return row

    def drop(self, client: str) -> None:
        """Free the row: the stream broke off."""
        if client in self._slot:
            self._free.append(self._slot.pop(client))

    def label(self, client: str, tier: str, records: int = 0) -> None:
        self._tier[client], self._records[client] = tier, records

    def records(self, clients: Sequence[str]) -> list[int]:
        """How many records each of these clients trained on, if they say so."""
        return [self._records[client] for client in clients]

    def gather(self, clients: Sequence[str]) -> tuple[Payload, list[str]]:
        """The rows of these clients in this order, moved together in place, and their tiers. Take no row afterwards."""
        matrix = reorder(self._matrix, [self._slot[c] for c in clients])
        self._slot, self._free = {client: row for row, client in enumerate(clients)}, []
        return matrix, [self._tier[c] for c in clients]


def mapped(file: int, rows: int, length: int, dtype: str = FLOAT32.dtype) -> Payload:
    """The first rows in a file, as a matrix; writing to it writes to the file."""
    kind = np.dtype(dtype)
    if not rows * length:  # a farewell has no updates
        return np.empty((rows, length), kind)
    matrix = np.frombuffer(mmap.mmap(file, kind.itemsize * rows * length), kind)
    return matrix.reshape(rows, length)
