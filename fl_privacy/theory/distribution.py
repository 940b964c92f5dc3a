"""The least time in which a round's updates and models can travel (ERIS, Appendix F.2 and Tables 3 to 5).

Every link has the same rate in both directions, and sends and receives at once. Updates may be compressed, models are
not. The equations of Ako, Shatter and Q-DPSGD-1 are fitted to the paper's tables: its text does not give them in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fl_privacy.errors import FederationError

PARTITIONS = 5  # Ako
NEIGHBOURS = 0.4  # Q-DPSGD-1: a client's neighbours, as a share of all others
SIX_BITS = 6 / 32  # Q-DPSGD-1: what its quantiser leaves of a float32


class Load(NamedTuple):
    """Bytes that one client, as a client, sends and receives in a round, and the least time of the round in seconds."""

    upload: float
    download: float
    seconds: float

    @property
    def total(self) -> float:
        return self.upload + self.download


@dataclass(frozen=True)
class Setting:
    """A model of `size` bytes, of which a client uploads `ratio`, at `rate` bytes per second."""

    size: float
    clients: int
    rate: float
    aggregators: int | None = None
    ratio: float = 1.0
    degree: float | None = None
    partitions: int | None = None

    def __post_init__(self) -> None:
        _check("size", self.size, _positive(self.size), "a positive number of bytes")
        _check("clients", self.clients, _count(self.clients), "a positive integer")
        _check("rate", self.rate, _positive(self.rate), "a positive number of bytes per second")
        _check("ratio", self.ratio, _positive(self.ratio) and self.ratio <= 1, "a number above 0 and at most 1")
        for name in ("aggregators", "partitions"):
            value = getattr(self, name)
            _check(name, value, value is None or _count(value), "a positive integer")
        near = self.degree is None or (_positive(self.degree) and self.degree < self.clients)
        _check("degree", self.degree, near, "a positive number below the number of clients")

    @property
    def update(self) -> float:
        """Bytes of a compressed update."""
        return self.ratio * self.size


def centralised(at: Setting) -> Load:
    """One server: max(K S'/r, S'/r) + max(K S/r, S/r) (Equation 52); S' is the size of an update."""
    return Load(at.update, at.size, at.clients * (at.update + at.size) / at.rate)


def eris(at: Setting) -> Load:
    """A of the clients aggregate: (K-1) S'/(A r) + (K-1) S/(A r) (Equation 53).

    An aggregator waits for K - 1 shards. That is never less than a client's own upload of S', or of S' (A-1)/A where
    every client aggregates.
    """
    count = at.clients if at.aggregators is None else at.aggregators
    _check("aggregators", count, count <= at.clients, f"at most the {at.clients} clients, or method shards")
    own = 1 if count < at.clients else 1 - 1 / count
    return Load(own * at.update, own * at.size, (at.clients - 1) / count * (at.update + at.size) / at.rate)


def separate(at: Setting) -> Load:
    """Aggregators that are no clients: max(K/A, 1) (S' + S)/r; each receives K shards (Equation 53, our setting)."""
    count = at.clients if at.aggregators is None else at.aggregators
    return Load(at.update, at.size, max(at.clients / count, 1) * (at.update + at.size) / at.rate)


def ako(at: Setting) -> Load:
    """2 (K-1) S'/(v r) with v partitions (Equation 54, fitted): one of them to and from every other client."""
    sent = (at.clients - 1) * at.update / (at.partitions or PARTITIONS)
    return Load(sent, sent, 2 * sent / at.rate)


def shatter(at: Setting) -> Load:
    """deg S'/r (Equation 55, fitted); the volumes count every chunk once, not once per neighbour, as the tables do."""
    default = min(3 if at.clients <= 10 else 4, at.clients - 1)
    degree = default if at.degree is None else at.degree
    return Load(at.update, at.update, degree * at.update / at.rate)


def q_dpsgd_1(at: Setting) -> Load:
    """2 deg S'/r (fitted): to and from every neighbour, by default 0.4 (K-1) of them, at 6 of 32 bits."""
    degree = NEIGHBOURS * (at.clients - 1) if at.degree is None else at.degree
    # A ratio of 1 would be no Q-DPSGD-1: it always quantises.
    sent = degree * (SIX_BITS if at.ratio == 1 else at.ratio) * at.size
    return Load(sent, sent, 2 * sent / at.rate)


METHODS: dict[str, Callable[[Setting], Load]] = {
    "fedavg": centralised,
    "fedavg-ldp": centralised,
    "priprune": centralised,
    "soteriafl": centralised,
    "ako": ako,
    "shatter": shatter,
    "q-dpsgd-1": q_dpsgd_1,
    "eris": eris,
    "shards": separate,
}


def load(method: str, setting: Setting) -> Load:
    """Volumes and time of a round by a method's name, in upper or lower case."""
    found = METHODS.get(method.lower()) if isinstance(method, str) else None
    if found is None:
        raise FederationError(f"method: {method!r} is unknown; use one of {', '.join(METHODS)}")
    return found(setting)


def distribution_time(
    method: str,
    size: float,
    clients: int,
    rate: float,
    aggregators: int | None = None,
    ratio: float = 1.0,
    degree: float | None = None,
    partitions: int | None = None,
) -> float:
    """Least seconds of a round with a model of `size` bytes and `rate` bytes per second; `ratio` of an update is sent.

    `aggregators` (default: as many as clients) is for eris, where clients aggregate, and shards, where other parties
    do; `degree` for shatter (default: 3 up to 10 clients, else 4) and q-dpsgd-1; `partitions` for ako (default: 5).
    """
    return load(method, Setting(size, clients, rate, aggregators, ratio, degree, partitions)).seconds


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(name: str, value: object, holds: bool, fix: str) -> None:
    if not holds:
        raise FederationError(f"{name}: {value!r} is out of range; use {fix}")
