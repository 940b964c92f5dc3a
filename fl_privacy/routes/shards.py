"""`route: {kind: shards}`: updates are split over several aggregators, and the server gets none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.errors import ConfigError, RoundFailed
from fl_privacy.round.settlement import SETTLEMENTS, Failures, Settlement
from fl_privacy.round.terms import joined
from fl_privacy.routes.base import (
    Ask,
    Outcome,
    Route,
    ServerEnd,
    ServerSeat,
    SiteEnd,
    SiteSeat,
    Trust,
    by_parameter,
    tickets,
)
from fl_privacy.routes.placement import AtSites, Placement
from fl_privacy.scores.shares import added
from fl_privacy.shard import masks
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class Injected(Model):
    """Failures on purpose."""

    aggregators: float = Field(0.0, ge=0, lt=1, description="fraction of the aggregators that miss a round, never all")
    links: float = Field(0.0, ge=0, lt=1, description="probability that an update misses an aggregator")


class ShardsRoute(Route):
    """Sites split updates into shards over several aggregators; the server receives none."""

    kind: Literal["shards"] = "shards"
    aggregators: int = Field(3, ge=2, le=masks.MAX_AGGREGATORS)
    shares: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="relative size of each aggregator's shard; all the same if empty"
    )
    n_min: int = Field(3, ge=2, description="smallest number of updates that may be averaged together")
    placement: Literal["processes", "sites"] = Field(
        "processes", description="aggregators are processes of their own, or the first of the sites aggregate"
    )
    settlement: Literal["all", "partial"] = Field(
        "all", description="apply what all aggregators have, or to each shard what its aggregator has"
    )
    failures: Injected = Field(
        Injected(), description="failures on purpose, to measure their cost; needs `audit: true`"
    )

    server_holds_model: ClassVar[bool] = False
    exchanges: ClassVar[tuple[str, ...]] = ("submit", "collect", "settle")
    remembers: ClassVar[bool] = True
    carries_counts: ClassVar[bool] = True

    @property
    def settling(self) -> Settlement:
        return SETTLEMENTS[self.settlement]

    @property
    def floor(self) -> int:
        return self.n_min

    @property
    def needs_all_sites(self) -> bool:
        return self._placed.needs_all_sites

    @property
    def _placed(self) -> Placement:
        return PLACEMENTS[self.placement]

    def parties(self) -> list[tuple[str, str]]:
        return self._placed.parties(self)

    def middleware(self) -> list[str]:
        return self._placed.middleware(self)

    def trust(self) -> list[Trust]:
        return self._placed.trust(self)

    def aggregating(self, federation: Federation) -> tuple[str, ...]:
        """The sites that aggregate a shard each, in the order of the shards."""
        return federation.site_names[: self.aggregators] if self.needs_all_sites else ()

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        yield from by_parameter(federation, "splitting into shards")
        yield from self._placed.problems(self, federation)
        if self.shares and len(self.shares) != self.aggregators:
            yield f"route.shares: {len(self.shares)} given for {self.aggregators} aggregators; give one for each"
        if self.failures != Injected() and not (federation.audit and self.settlement == "partial"):
            yield "route.failures: lose updates on purpose; set `audit: true` and `settlement: partial`, or remove them"
        rule = federation.combine
        if not rule.coordinatewise:
            yield f"combine.kind: {rule.kind} needs whole updates, and an aggregator has only a shard; use fedavg"

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        return self._placed.cost(self, federation, parameters)

    def cost_of_processes(self, federation: Federation, parameters: int) -> list[Cost]:
        """The cost where aggregators are processes of their own."""
        a, n, d, coding = self.aggregators, federation.cohort, parameters, federation.coding
        shard, ticket, c = max(masks.sizes(d, a, self.shares)), tickets(federation), federation.bytes_of_counts
        fetches = not federation.sites_evaluate  # the evaluator
        return [
            # open, collect, settle; evaluate
            cost(coding, "server", 1, 3 * a + fetches + ticket * n, models=(0, 0), updates=(0, 0), counts=(a * c, 0)),
            cost(
                coding,
                "aggregator",
                a,
                2 * n + 3 + fetches,
                models=(0, (n + fetches) * shard),
                updates=(n * shard, 0),
                counts=(n * c, c),
            ),
            cost(coding, "evaluator", 1, fetches * (a + 1), models=(fetches * d, 0), updates=(0, 0)),
            cost(coding, "site", n, 2 * a + ticket, models=(d, 0), updates=(0, d), counts=(0, a * c)),
        ]

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        """The evaluator gives out the first model; sites fetch the last one."""
        a, n, d, coding = self.aggregators, len(federation.sites), parameters, federation.coding
        shard = max(masks.sizes(d, a, self.shares))
        return [
            cost(coding, "server", 1, 3 * a + 1, models=(0, 0), updates=(0, 0)),
            cost(coding, "aggregator", a, 2 * n + 4, models=(shard, n * shard), updates=(0, 0)),
            cost(coding, "evaluator", 1, a + 1, models=(0, d), updates=(0, 0)),
            cost(coding, "site", n, 2 * a, models=(d, 0), updates=(0, 0)),
        ]

    def parts(self, federation: Federation, parameters: int) -> Cut:
        return self._cut(federation, parameters, FLOAT32)

    def cut(self, federation: Federation, parameters: int) -> Cut:
        """How an update is split as it travels."""
        return self._cut(federation, parameters, federation.coding)

    def _cut(self, federation: Federation, parameters: int, coding: Coding) -> Cut:
        if 0 in masks.sizes(parameters, self.aggregators, self.shares):
            raise ConfigError(f"route.aggregators: a shard of {parameters} parameters would be empty; use fewer")
        return Cut(parameters, self.aggregators, federation.seed, coding, self.shares)

    def site(self, seat: SiteSeat) -> SiteEnd:
        return self._placed.site(self, seat)

    def server(self, seat: ServerSeat) -> ServerEnd:
        return self._placed.server(self, seat)


class Cut:
    """Splits and joins vectors along the run's masks; the next call overwrites the results.

    Sites, server and evaluator use it alike.
    """

    def __init__(
        self,
        parameters: int,
        aggregators: int,
        seed: int,
        coding: Coding = FLOAT32,
        shares: Sequence[float] = (),
    ) -> None:
        self.aggregators, self._parameters, self._seed, self._coding = aggregators, parameters, seed, coding
        self._shares = shares
        # Kept and reused: new vectors would be faulted in page by page every round.
        self._parts: Payload | None = None
        self._whole: Vector | None = None

    @cached_property
    def owners(self) -> masks.Owners:
        return masks.owners(self._parameters, self.aggregators, self._seed, self._shares)

    def sizes(self) -> list[int]:
        """Numbers in each shard of an update as it travels."""
        return [self._coding.length(size) for size in masks.sizes(self._parameters, self.aggregators, self._shares)]

    def split(self, payload: Payload) -> list[Payload]:
        """The shards of an update, or of a model."""
        if self._coding.by_part:
            return np.split(payload, np.cumsum(self.sizes())[:-1])
        if payload.dtype != np.float32 or self._coding.per_parameter != 1:
            whose = np.repeat(self.owners, self._coding.per_parameter)
            return [np.ascontiguousarray(payload[whose == k]) for k in range(self.aggregators)]
        self._parts = np.empty_like(payload) if self._parts is None else self._parts
        return list(masks.split(payload, self.owners, self.aggregators, shares=self._shares, out=self._parts))

    def join(self, models: list[Vector]) -> Vector:
        """The model from its shards."""
        self._whole = np.empty(self._parameters, np.float32) if self._whole is None else self._whole
        return masks.join(models, self.owners, shares=self._shares, out=self._whole)

    def digest(self, digests: list[bytes]) -> bytes:
        """What stands for a model in the terms of an attempt, from the digests of its shards."""
        return joined(digests)


class AtServer:
    """The server sees phases, counts and metrics."""

    def __init__(self, route: ShardsRoute, seat: ServerSeat) -> None:
        from fl_privacy.round.collector import Collector

        self._settling, self._cut = route.settling, route.cut(seat.federation, seat.layout.size)
        self._failures = Failures(route.failures.aggregators, route.failures.links, seat.federation.seed)
        self._round = Collector(seat, self._settling.tolerant)
        self._shards: list[bytes] = []
        self._plays: Counter[int] = Counter()  # attempts at a round
        self.finish = self._round.finish

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        self._shards = self._round.shards(run, round, self._shards)
        return joined(self._shards)

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.wire.client import counts_in

        for index, size in enumerate(self._cut.sizes()):
            self._round.open(index, ask, 0 if ask.farewell else size, shards=self._shards)
        releases, receipts = self._round.collect(ask)
        if not ask.farewell:
            releases = self._failures.of(releases, ask.round, self._plays[ask.round])
            self._plays[ask.round] += 1
        decisions = self._settling.decide(releases, ask.terms.quorum)
        replies = self._round.settle(ask, decisions)
        if all(decision.problem for decision in decisions):
            raise RoundFailed(decisions[0].problem)
        outcome = Outcome(max(decision.updates for decision in decisions if not decision.problem), receipts=receipts)
        # The sum is in none of the aggregators' sums, but in all of them together.
        shares = [counts for reply in replies if reply and (counts := counts_in(reply.counts)) is not None]
        if len(shares) == len(replies):
            outcome.counts, outcome.counted = (
                added(shares, ask.counts),
                min(reply.counted for reply in replies if reply),
            )
            outcome.seen = {"counts": np.stack(shares)}
        return outcome

    def confirm(self, ask: Ask) -> None:
        """The aggregators keep the model themselves."""

    def copies(self, ask: Ask) -> int:
        return 0


class Processes:
    """Every aggregator is a process of its own, and an evaluator joins the shards."""

    needs_all_sites = False

    def parties(self, route: ShardsRoute) -> list[tuple[str, str]]:
        return [*(("aggregator", name) for name in self.middleware(route)), ("evaluator", "evaluator")]

    def middleware(self, route: ShardsRoute) -> list[str]:
        return [f"aggregator-{k}" for k in range(route.aggregators)]

    def trust(self, route: ShardsRoute) -> list[Trust]:
        return [
            Trust(parties=tuple(self.middleware(route))),
            Trust(parties=("evaluator",), learn="the model after every round"),
        ]

    def problems(self, route: ShardsRoute, federation: Federation) -> Iterator[str]:
        yield from ()

    def cost(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]:
        return route.cost_of_processes(federation, parameters)

    def site(self, route: ShardsRoute, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.round.member import Member

        return Member(seat, route.cut(seat.federation, seat.layout.size), tolerant=route.settling.tolerant)

    def server(self, route: ShardsRoute, seat: ServerSeat) -> ServerEnd:
        return AtServer(route, seat)


PLACEMENTS: dict[str, Placement] = {"processes": Processes(), "sites": AtSites()}
