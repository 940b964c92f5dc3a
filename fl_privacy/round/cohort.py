"""The sites of an attempt. One digest commits to all of them and names none, and each site can find itself in it."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from fl_privacy.crypto import keys, merkle
from fl_privacy.errors import require


class Place(NamedTuple):
    """What a site needs to find itself in a cohort: its own salt, and its path to the root."""

    salt: bytes
    position: int
    path: Sequence[bytes]

    def root(self, site: str, count: int) -> bytes | None:
        """The root that the place leads to, in a cohort of `count` sites."""
        return merkle.climb(_leaf(self.salt, site), self.position, count, self.path)


class Cohort:
    """Names in ascending order. The leaves are salted one by one and sorted, so that a place says nothing of others."""

    def __init__(self, sites: Iterable[str], salt: bytes) -> None:
        self.sites = tuple(sorted(sites))
        keys.check_key(salt)
        self._salts = {site: _salt(salt, site) for site in self.sites}

    @cached_property
    def _leaves(self) -> list[bytes]:
        return sorted(_leaf(salt, site) for site, salt in self._salts.items())

    @cached_property
    def root(self) -> bytes:
        return merkle.root(self._leaves)

    def place(self, site: str) -> Place:
        index = self._leaves.index(_leaf(self._salts[site], site))
        return Place(self._salts[site], index, merkle.path(self._leaves, index))

    def bits(self, sites: Iterable[str]) -> bytes:
        """Which of the cohort these are: one bit per site, in the order of their names."""
        wanted = set(sites)
        number = sum(1 << position for position, site in enumerate(self.sites) if site in wanted)
        return number.to_bytes(-(-len(self.sites) // 8), "little")

    def of_bits(self, bits: bytes) -> tuple[str, ...]:
        """The inverse of `bits`."""
        number = int.from_bytes(bits, "little")
        fits = len(bits) == -(-len(self.sites) // 8) and number >> len(self.sites) == 0
        require(fits, f"members: not one bit for each of {len(self.sites)} sites")
        return tuple(site for position, site in enumerate(self.sites) if number >> position & 1)


def salt_of(secret: bytes, run: str, model: bytes) -> bytes:
    """The server's salt for a model: a cohort has one root for it, and another root for every other model."""
    return keys.derive(secret, run, 0, model.hex(), "cohort")


def _salt(salt: bytes, site: str) -> bytes:
    return hmac.digest(salt, site.encode(), "sha256")


def _leaf(salt: bytes, site: str) -> bytes:
    return merkle.leaf(salt + site.encode())
