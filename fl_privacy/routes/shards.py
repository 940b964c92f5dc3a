"""`route: {kind: shards}`: updates are split over several aggregators, and the server gets none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field

from fl_privacy.coding import Payload
from fl_privacy.errors import RoundFailed
from fl_privacy.routes.base import Ask, Outcome, Route, ServerSeat, SiteEnd, SiteSeat, Trust, by_parameter, tickets
from fl_privacy.scores.shares import added
from fl_privacy.shard import masks
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.wire.client import Release


class Settlement(Protocol):
    """Which aggregators may apply a round."""

    def decide(self, releases: Sequence[Release]) -> tuple[list[bool], str]:
        """For each aggregator whether it applies the round; and, if the round has failed, why."""


class AllOrNone:
    """A round counts if every aggregator has closed it with the same updates."""

    def decide(self, releases: Sequence[Release]) -> tuple[list[bool], str]:
        agreed = len({(r.phase, r.members) for r in releases}) == 1 and releases[0].phase == "closed"
        reasons = sorted({r.reason for r in releases if r.reason}) or ["the aggregators did not get the same updates"]
        return [agreed] * len(releases), "" if agreed else reasons[0]


class ShardsRoute(Route):
    """Sites split updates into shards over several aggregators; the server receives none."""

    kind: Literal["shards"] = "shards"
    aggregators: int = Field(3, ge=2, le=255)
    n_min: int = Field(2, ge=2, description="smallest number of updates that may be averaged together")

    exchanges: ClassVar[tuple[str, ...]] = ("submit", "collect", "settle")
    carries_counts: ClassVar[bool] = True
    settlement: ClassVar[Settlement] = AllOrNone()

    @property
    def floor(self) -> int:
        return self.n_min

    def parties(self) -> list[tuple[str, str]]:
        return [*(("aggregator", name) for name in self.middleware()), ("evaluator", "evaluator")]

    def middleware(self) -> list[str]:
        return [f"aggregator-{k}" for k in range(self.aggregators)]

    def trust(self) -> list[Trust]:
        return [
            Trust(parties=tuple(self.middleware())),
            Trust(parties=("evaluator",), learn="the model after every round"),
        ]

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        yield from by_parameter(federation, "splitting into shards")
        rule = federation.combine
        if not rule.coordinatewise:
            yield f"combine.kind: {rule.kind} needs whole updates, and an aggregator has only a shard; use fedavg"
        if rule.weights != "equal":
            yield f"combine.weights: {rule.weights!r} is not supported with shards; use equal"

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        a, n, d, coding = self.aggregators, federation.cohort, parameters, federation.coding
        shard, ticket, c = -(-d // a), tickets(federation), federation.bytes_of_counts
        return [
            # open, collect, settle; evaluate
            cost(coding, "server", 1, 3 * a + 1 + ticket * n, models=(0, 0), updates=(0, 0), counts=(a * c, 0)),
            cost(
                coding,
                "aggregator",
                a,
                2 * n + 4,
                models=(0, (n + 1) * shard),
                updates=(n * shard, 0),
                counts=(n * c, c),
            ),
            cost(coding, "evaluator", 1, a + 1, models=(d, 0), updates=(0, 0)),
            cost(coding, "site", n, 2 * a + ticket, models=(d, 0), updates=(0, d), counts=(0, a * c)),
        ]

    def cut(self, federation: Federation, parameters: int) -> Cut:
        return Cut(parameters, self.aggregators, federation.seed, federation.coding.per_parameter)

    def site(self, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.round.member import Member

        return Member(seat, self.cut(seat.federation, seat.layout.size))

    def server(self, seat: ServerSeat) -> AtServer:
        return AtServer(self, seat)


class Cut:
    """Splits and joins vectors along the run's masks; the next call overwrites the results.

    Sites, server and evaluator use it alike.
    """

    def __init__(self, parameters: int, aggregators: int, seed: int, per_parameter: int = 1) -> None:
        self.aggregators, self._parameters, self._seed, self._numbers = aggregators, parameters, seed, per_parameter
        # Kept and reused: new vectors would be faulted in page by page every round.
        self._parts: Payload | None = None
        self._whole: Vector | None = None

    @cached_property
    def owners(self) -> masks.Owners:
        return masks.owners(self._parameters, self.aggregators, self._seed)

    def sizes(self) -> list[int]:
        """Numbers in each shard of an update as it travels."""
        return [self._numbers * int(size) for size in np.bincount(self.owners, minlength=self.aggregators)]

    def split(self, payload: Payload) -> list[Payload]:
        """The shards of an update, or of a model."""
        if payload.dtype != np.float32 or self._numbers != 1:
            whose = np.repeat(self.owners, self._numbers)
            return [np.ascontiguousarray(payload[whose == k]) for k in range(self.aggregators)]
        self._parts = np.empty_like(payload) if self._parts is None else self._parts
        return list(masks.split(payload, self.owners, self.aggregators, out=self._parts))

    def join(self, models: list[Vector]) -> Vector:
        """The model from its shards."""
        self._whole = np.empty(self._parameters, np.float32) if self._whole is None else self._whole
        return masks.join(models, self.owners, out=self._whole)


class AtServer:
    """The server sees phases, counts and metrics."""

    def __init__(self, route: ShardsRoute, seat: ServerSeat) -> None:
        from fl_privacy.round.collector import Collector

        self._settlement, self._cut = route.settlement, route.cut(seat.federation, seat.layout.size)
        self._round = Collector(seat)
        self.finish = self._round.finish

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        for index, size in enumerate(self._cut.sizes()):
            self._round.open(index, ask, 0 if ask.farewell else size)
        releases, receipts = self._round.collect(ask)
        commits, problem = self._settlement.decide(releases)
        self._round.settle(ask, commits)
        if problem:
            raise RoundFailed(problem)
        # The sum is in none of the aggregators' sums, but in all of them together.
        shares = [release.counts for release in releases if release.counts is not None]
        outcome = Outcome(releases[0].count, receipts=receipts)
        if len(shares) == len(releases):
            outcome.counts, outcome.counted = added(shares, ask.counts), releases[0].counted
            outcome.seen = {"counts": np.stack(shares)}
        return outcome

    def copies(self, ask: Ask) -> int:
        return 0
