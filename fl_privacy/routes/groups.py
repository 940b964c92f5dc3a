"""`route: {kind: groups}`: secret groups of sites, of which the server gets the sums. Simulation only.

A median needs single values, and a sum over all sites hides them; sums over small groups are in between (Athanasiou et
al. 2026, Appendix F.9). In a deployment, groups this small are below what sites want to be released with, and somebody
would have to add them up: here the server's process stands for that party, and records the sums alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.coding import FLOAT32
from fl_privacy.routes.base import UPDATES, Trust
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat
from fl_privacy.routes.server import AtServer, ThroughFlower
from fl_privacy.shuffle.layer import permutations
from fl_privacy.steps.base import single_use_key
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class GroupsRoute(ThroughFlower):
    """The server gets the mean update of each group; the groups are new and secret in every round. Simulation only."""

    kind: Literal["groups"] = "groups"
    size: int = Field(2, ge=2, description="sites per group; groups get one more where the cohort is no multiple")

    simulated: ClassVar[bool] = True

    @property
    def floor(self) -> int:
        return self.size

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if federation.hosts is not None:
            yield f"hosts: route {self.kind} runs on the simulation engine only; remove hosts, or use shuffler"
        if federation.coding != FLOAT32:
            yield f"encode: route {self.kind} adds up float32, and updates are {federation.coding.name}; use none"
        if federation.combine.weights != "equal":
            yield f"combine.weights: a group on route {self.kind} has one weight for all its sites; use equal"

    def trust(self, federation: Federation) -> list[Trust]:
        return [Trust(parties=("server",), learn=UPDATES)]

    def server(self, seat: ServerSeat) -> AtGroups:
        return AtGroups(seat, self.size)


def grouped(count: int, size: int, key: bytes) -> list[NDArray[np.int64]]:
    """Every one of `count` in one group of at least `size`, uniformly at random by a single-use key."""
    (order,) = permutations(count, 1, key)
    return np.array_split(order, max(1, count // size))


class AtGroups(AtServer):
    """Adds up what came, group by group, and keeps nothing else of it."""

    def __init__(self, seat: ServerSeat, size: int) -> None:
        super().__init__(seat)
        self._group_size = size

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.transcript.events import Row  # reading a config does not need the transcript

        came = super().play(ask, model)
        came.receipts = [event for event in came.receipts if not isinstance(event, Row)]
        if came.rows is not None:
            key = single_use_key(self._federation, ask, "", "groups")
            groups = grouped(len(came.rows), self._group_size, key)
            came.tiers = [_weakest([came.tiers[i] for i in group]) for group in groups]
            means = [came.rows[group].mean(axis=0, dtype=np.float64) for group in groups]
            came.rows, came.owners = np.stack(means).astype(np.float32), []
        return came


def _weakest(tiers: Sequence[str]) -> str:
    """The smallest budget, which never says that an update has less noise than it has."""
    return min(tiers, key=lambda tier: float(tier or "inf"))
