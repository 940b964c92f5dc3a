"""Where a middleware keeps the updates of one attempt: rows of a matrix, only as long as the round lives."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import psutil
from numpy.typing import NDArray

from fl_privacy.errors import ProtocolError
from fl_privacy.shuffle import reorder


class Rows:
    """One row a client, written in place while its stream arrives.

    They lie in a nameless file in memory, `file`: a process that is handed the descriptor can work on them in place.
    """

    def __init__(self, cohort: int, length: int) -> None:
        size = 4 * cohort * length
        if size > psutil.virtual_memory().total:
            raise ProtocolError("RESOURCE_EXHAUSTED", f"length: no memory for {cohort} x {length} parameters")
        self.file = os.memfd_create("rows")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        self._matrix = mapped(self.file, cohort, length)
        self._free = list(range(cohort))[::-1]
        self._slot: dict[str, int] = {}
        self._tier: dict[str, str] = {}

    def take(self, client: str) -> NDArray[np.float32]:
        """The client's row: a new one, or the one that its superseded stream was filling."""
        if client not in self._slot:
            self._slot[client] = self._free.pop()
        row: NDArray[np.float32] = self._matrix[self._slot[client]]
        return row

    def drop(self, client: str) -> None:
        """Give the row back: the stream broke off."""
        if client in self._slot:
            self._free.append(self._slot.pop(client))

    def label(self, client: str, tier: str) -> None:
        self._tier[client] = tier

    def gather(self, clients: Sequence[str]) -> tuple[NDArray[np.float32], list[str]]:
        """The rows of these clients in their order, moved together in place, and their tiers; no row is taken after."""
        matrix = reorder(self._matrix, [self._slot[c] for c in clients])
        self._slot, self._free = {client: row for row, client in enumerate(clients)}, []
        return matrix, [self._tier[c] for c in clients]


def mapped(file: int, rows: int, length: int) -> NDArray[np.float32]:
    """The first rows in a file, as a matrix; what is written to it is in the file."""
    matrix = np.frombuffer(mmap.mmap(file, 4 * rows * length), np.float32)
    return matrix.reshape(rows, length)
