"""The counts of an attempt: kept until its end, and released as one sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import require
from fl_privacy.scores.form import Counts

NUMBER = np.dtype("<u8")


def received(data: bytes, length: int) -> Counts | None:
    """The counts in a header: none, or exactly as many numbers as the round has."""
    if not data:
        return None
    require(len(data) == length * NUMBER.itemsize, f"counts: {len(data)} bytes, but the round has {length} numbers")
    return np.frombuffer(data, NUMBER).astype(np.uint64)


def sent(counts: Counts | None) -> bytes:
    """The counts as a header carries them."""
    return b"" if counts is None else counts.astype(NUMBER).tobytes()


class Counted:
    """The counts that came, until they are released as one sum."""

    def __init__(self, length: int) -> None:
        self._length, self._kept = length, dict[str, Counts]()

    def add(self, site: str, counts: Counts) -> None:
        """Once per site."""
        self._kept[site] = counts

    @property
    def sites(self) -> tuple[str, ...]:
        """Who sent counts, by name."""
        return tuple(sorted(self._kept))

    def total(self, sites: Iterable[str] | None = None) -> Counts | None:
        """The sum over these sites, or all, modulo 2^64; None without any."""
        chosen = [self._kept[site] for site in (self.sites if sites is None else sites)]
        return np.sum(chosen, axis=0, dtype=np.uint64) if chosen else None

    def stored(self, sites: Sequence[str]) -> dict[str, NDArray[Any]]:
        """What was received, one row per site, for the party's own record; zeros where a site sent none."""
        if not self._kept:
            return {}
        none = np.zeros(self._length, np.uint64)
        return {"counts": np.stack([self._kept.get(site, none) for site in sites])}
