"""`route: {kind: shards}`: updates are split over several aggregators, and the server gets none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.coding import FLOAT32, Coding
from fl_privacy.errors import ConfigError, RoundFailed
from fl_privacy.round.settlement import SETTLEMENTS, Failures, Settlement
from fl_privacy.round.terms import joined
from fl_privacy.routes.base import Route, Trust, by_parameter, farewells, tickets
from fl_privacy.routes.cut import Cut
from fl_privacy.routes.ends import Ask, Outcome, ServerEnd, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.routes.placement import AtSites, Placement
from fl_privacy.scores.shares import added
from fl_privacy.shard import masks
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.theory.distribution import distribution_time
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
    masks: Literal["run", "round"] = Field(
        "run",
        description="an aggregator has the same coordinates all run long, or others every round",
    )
    placement: Literal["processes", "sites"] = Field(
        "processes",
        description="aggregators are processes of their own, or the first of the sites aggregate",
    )
    settlement: Literal["all", "partial"] = Field(
        "all", description="apply what all aggregators have, or to each shard what its aggregator has"
    )
    failures: Injected = Field(
        Injected(), description="failures on purpose, to measure their cost; needs `audit: true`"
    )

    server_holds_model: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    carries_counts: ClassVar[bool] = True

    @property
    def exchanges(self) -> tuple[str, ...]:
        return self._placed.exchanges

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
    def tolerant(self) -> bool:
        return self.settling.tolerant

    @property
    def joins_every_round(self) -> bool:
        return self.masks == "round"

    @property
    def _placed(self) -> Placement:
        return PLACEMENTS[self.placement]

    def parties(self) -> list[tuple[str, str]]:
        return self._placed.parties(self)

    def middleware(self) -> list[str]:
        return self._placed.middleware(self)

    def trust(self, federation: Federation) -> list[Trust]:
        return self._placed.trust(self, federation)

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
        if self.masks == "round":
            yield from self._changing(federation)

    def _changing(self, federation: Federation) -> Iterator[str]:
        """Masks per round move every coordinate to another aggregator, which has nothing of its earlier rounds."""
        changing = "with `masks: round` an aggregator has other coordinates every round"
        if federation.coding.by_part:
            yield f"compress.kind: {federation.compress.kind} keeps references, and {changing}; use `masks: run`"
        if federation.combine.optimiser().names:
            yield f"combine.kind: {federation.combine.kind} keeps moments, and {changing}; use fedavg or `masks: run`"
        if self.settlement == "partial":
            yield f"route.settlement: partial keeps old shards, and {changing}; use all"

    def _check_shards(self, parameters: int) -> None:
        if 0 in masks.sizes(parameters, self.aggregators, self.shares):
            raise ConfigError(f"route.aggregators: a shard of {parameters} parameters would be empty; use fewer")

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        self._check_shards(parameters)
        return self._placed.cost(self, federation, parameters)

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        return self._placed.once(self, federation, parameters)

    def published(self, federation: Federation, size: int, rate: float) -> float | None:
        """Where sites aggregate, as in the paper; but there they reach each other without a mailbox between them."""
        if not self.needs_all_sites:
            return None
        sites, ratio = len(federation.sites), federation.coding.nbytes(size // FLOAT32.nbytes(1)) / size
        return distribution_time("eris", size, sites, rate, self.aggregators, min(1.0, ratio))

    def parts(self, federation: Federation, parameters: int) -> Cut:
        return self._cut(federation, parameters, FLOAT32)

    def cut(self, federation: Federation, parameters: int) -> Cut:
        """How an update is split as it travels."""
        return self._cut(federation, parameters, federation.coding)

    def _cut(self, federation: Federation, parameters: int, coding: Coding) -> Cut:
        self._check_shards(parameters)
        to = self.aggregating(federation) or self.middleware()
        return Cut(parameters, self.aggregators, federation.seed, coding, self.shares, self.masks == "round", to)

    def site(self, seat: SiteSeat) -> SiteEnd:
        return self._placed.site(self, seat)

    def server(self, seat: ServerSeat) -> ServerEnd:
        return self._placed.server(self, seat)


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
    """Every aggregator is a process of its own, and an evaluator joins the shards.

    With `masks: round` it also cuts the model for the next round, and so carries it from one to the other.
    """

    needs_all_sites = False
    exchanges: tuple[str, ...] = ("shard", "open", "collect", "settle")

    def parties(self, route: ShardsRoute) -> list[tuple[str, str]]:
        return [*(("aggregator", name) for name in self.middleware(route)), ("evaluator", "evaluator")]

    def middleware(self, route: ShardsRoute) -> list[str]:
        return [f"aggregator-{k}" for k in range(route.aggregators)]

    def trust(self, route: ShardsRoute, federation: Federation) -> list[Trust]:
        found = [
            Trust(parties=tuple(self.middleware(route))),
            Trust(parties=("evaluator",), learn="the model after every round"),
        ]
        # It could give out an old model again, and the server another cohort for it.
        return [*found, Trust(parties=("evaluator", "server"))] if route.joins_every_round else found

    def problems(self, route: ShardsRoute, federation: Federation) -> Iterator[str]:
        yield from ()

    def cost(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]:
        a, n, d, coding = route.aggregators, federation.cohort, parameters, federation.coding
        shard, ticket, c = max(masks.sizes(d, a, route.shares)), tickets(federation), federation.bytes_of_counts
        cuts, calls = route.joins_every_round, a * len(self.exchanges)
        fetches = cuts or not federation.sites_evaluate  # the evaluator
        return [
            cost(coding, "server", 1, calls + fetches + ticket * n, models=(0, 0), updates=(0, 0), counts=(a * c, 0)),
            cost(
                coding,
                "aggregator",
                a,
                2 * n + len(self.exchanges) + fetches + cuts,
                models=(cuts * shard, (n + fetches) * shard),
                updates=(n * shard, 0),
                counts=(n * c, c),
            ),
            cost(coding, "evaluator", 1, fetches * (a + 1) + cuts * a, models=(fetches * d, cuts * d), updates=(0, 0)),
            cost(coding, "site", n, 2 * a + ticket, models=(d, 0), updates=(0, d), counts=(0, a * c)),
        ]

    def once(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]:
        """The evaluator gives out the first model; sites fetch the last one, and send their counts of it."""
        a, n, d, coding = route.aggregators, len(federation.sites), parameters, federation.coding
        shard, last, c = max(masks.sizes(d, a, route.shares)), farewells(federation), federation.bytes_of_counts
        given, calls = (shard, last * n * shard), last * len(self.exchanges)
        return [
            cost(coding, "server", 1, calls * a + 1, models=(0, 0), updates=(0, 0), counts=(a * c, 0)),
            cost(coding, "aggregator", a, 2 * n * last + calls + 1, models=given, updates=(0, 0), counts=(n * c, c)),
            cost(coding, "evaluator", 1, a + 1, models=(0, d), updates=(0, 0)),
            cost(coding, "site", n, 2 * a * last, models=(last * d, 0), updates=(0, 0), counts=(0, a * c)),
        ]

    def site(self, route: ShardsRoute, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.round.member import Member

        return Member(seat, route.cut(seat.federation, seat.layout.size), tolerant=route.tolerant)

    def server(self, route: ShardsRoute, seat: ServerSeat) -> ServerEnd:
        return AtServer(route, seat)


PLACEMENTS: dict[str, Placement] = {"processes": Processes(), "sites": AtSites()}
