"""Which records a task of your own holds out: a record's own content decides, as in the data sets of ours."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks.own_files import HeldOut, contents


def held_out(*columns: Any, ratio: float = 0.2, seed: int = 0) -> NDArray[np.bool_]:
    """Which records to hold out: about `ratio` of them, each by a hash of its own values and the seed.

    Give everything a record consists of, one row per record. A record more or less moves no other record, as DP-SGD
    needs; the order does not matter; and copies of a record are on the same side.
    """
    if not columns or not 0 < ratio < 1:
        raise DataError(f"held_out: {len(columns)} arrays and ratio {ratio}; give arrays, and a ratio between 0 and 1")
    plain = [_plain(np.asarray(column)) for column in columns]
    if len({len(column) for column in plain}) > 1:
        raise DataError(f"held_out: arrays of {', '.join(str(len(c)) for c in plain)} rows; give one row per record")
    return HeldOut(ratio=ratio, seed=seed).drawn(contents(*plain))


def _plain(column: NDArray[Any]) -> NDArray[Any]:
    """A form in which the bytes of a row depend on this row alone, not on the type that others demand of the array."""
    if any(np.issubdtype(column.dtype, one) for one in (np.bool_, np.integer, np.floating)):
        return column.astype(np.float64)
    if not any(np.issubdtype(column.dtype, one) for one in (np.str_, np.bytes_)) or not column.ndim:
        raise DataError(f"held_out: an array is of type {column.dtype}; give numbers or text, one row per record")
    rows = ["\0".join(map(str, np.atleast_1d(row).tolist())) for row in column]
    made = np.empty(len(rows), "S32")
    made[:] = [blake2b(row.encode(), digest_size=16).hexdigest() for row in rows]
    return made
