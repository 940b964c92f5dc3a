"""The counts of an attempt: added as they arrive, and released as one sum."""

from __future__ import annotations

from collections.abc import Sequence
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
    """A sum and who is in it. Single counts are kept only by a party that records its own view."""

    def __init__(self, length: int, keep: bool) -> None:
        self._sum: Counts = np.zeros(length, np.uint64)
        self._kept: dict[str, Counts] | None = {} if keep else None
        self.sites: set[str] = set()

    def add(self, site: str, counts: Counts) -> None:
        """Once per site; modulo 2^64."""
        self.sites.add(site)
        self._sum += counts
        if self._kept is not None:
            self._kept[site] = counts

    @property
    def total(self) -> Counts | None:
        """The sum, if any site is in it."""
        return self._sum if self.sites else None

    def release(self, least: int) -> dict[str, Any]:
        """The fields of a release: the sum, if it is of at least so many sites."""
        enough = len(self.sites) >= least
        return {"counts": sent(self.total), "counted": len(self.sites)} if enough else {}

    def stored(self, sites: Sequence[str]) -> dict[str, NDArray[Any]]:
        """What was received, one row per site, for the party's own record; zeros where a site sent none."""
        if not self._kept:
            return {}
        none = np.zeros_like(self._sum)
        return {"counts": np.stack([self._kept.get(site, none) for site in sites])}
