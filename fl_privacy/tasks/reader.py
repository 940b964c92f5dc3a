"""A PyTorch Dataset, or any other sequence of (record, label) pairs, read into memory: bounded, and copied once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from fl_privacy.errors import DataError

SHARE = 0.5  # of the memory that is free when the reading begins
FIRST = 1024  # rows for which there is room at first, where nobody says how many there are
PAIR = "give (record, label) pairs"


def read(pairs: Any, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """All records and labels. Only indices below the length are asked for, as a Dataset promises them."""
    count = len(pairs) if hasattr(pairs, "__len__") else None
    each = (pairs[at] for at in range(count)) if count is not None and hasattr(pairs, "__getitem__") else iter(pairs)
    limit = _limit()
    x, y = _Column(count, limit, f"{where}: records"), _Column(count, limit, f"{where}: labels")
    for at, (record, label) in enumerate(_pairs(each, where)):
        x.put(at, record)
        y.put(at, label)
    return x.filled, y.filled


def check_room(needed: int, what: str, limit: int | None = None) -> None:
    """Refuse to take more memory than half of what is free."""
    limit = _limit() if limit is None else limit
    if needed > limit:
        sizes = f"need {needed / 2**30:.1f} GiB, and half of the free memory is {limit / 2**30:.1f} GiB"
        raise DataError(f"{what} {sizes}; return fewer or smaller ones")


def _limit() -> int:
    return int(psutil.virtual_memory().available * SHARE)


def _pairs(each: Iterator[Any], where: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for at, pair in enumerate(each):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            length = f" of {len(pair)}" if isinstance(pair, tuple | list | dict) else ""
            raise DataError(f"{where}: number {at} is {type(pair).__name__}{length}; {PAIR}")
        record, label = (np.asarray(part.detach().cpu() if hasattr(part, "detach") else part) for part in pair)
        yield record, label


class _Column:
    """Rows of one shape and type, in one array that grows."""

    def __init__(self, count: int | None, limit: int, where: str) -> None:
        self._count, self._limit, self._where = count, limit, where
        self._rows, self._used = np.empty(0), 0

    def put(self, at: int, row: NDArray[Any]) -> None:
        if at == 0:
            self._rows = self._room(self._count if self._count is not None else FIRST, row)
        if row.shape != self._rows.shape[1:]:
            shapes = f"number {at} has shape {row.shape}, and those before have {self._rows.shape[1:]}"
            raise DataError(f"{self._where}: {shapes}; give all the same shape")
        if at >= len(self._rows):
            self._rows = np.concatenate([self._rows, self._room(len(self._rows), row)])
        if not np.can_cast(row.dtype, self._rows.dtype, "safe"):
            self._rows = self._rows.astype(np.result_type(row.dtype, self._rows.dtype))
        self._rows[at], self._used = row, at + 1

    def _room(self, more: int, row: NDArray[Any]) -> NDArray[Any]:
        """Refused before the memory is taken: the machine has other work too."""
        count = len(self._rows) + more
        check_room(count * row.nbytes, f"{self._where}: {count:,} of {row.nbytes:,} bytes", self._limit)
        return np.empty((more, *row.shape), row.dtype)

    @property
    def filled(self) -> NDArray[Any]:
        return self._rows[: self._used]
