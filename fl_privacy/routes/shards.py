"""`route: {kind: shards}`: updates are split over several aggregators, and the server gets none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, reduce
from operator import and_
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from fl_privacy.coding import Payload
from fl_privacy.errors import RoundFailed
from fl_privacy.round.terms import joined
from fl_privacy.routes.base import Ask, Outcome, Route, ServerSeat, SiteEnd, SiteSeat, Trust, by_parameter, tickets
from fl_privacy.scores.shares import added
from fl_privacy.shard import masks
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.wire.client import Release


class Decision(NamedTuple):
    """Whose updates and whose counts all aggregators apply, one bit per site; or why the round has failed."""

    members: bytes = b""
    senders: bytes = b""
    problem: str = ""


class Settlement(Protocol):
    """Which updates the aggregators apply."""

    def decide(self, releases: Sequence[Release], quorum: int) -> Decision: ...


class Intersection:
    """A round counts with the updates that every aggregator has: a site that sends to some of them only is left out."""

    def decide(self, releases: Sequence[Release], quorum: int) -> Decision:
        failed = sorted({release.reason for release in releases if release.phase != "closed"})
        if failed:
            return Decision(problem=failed[0] or "an aggregator did not close the round")
        members = _common(release.members for release in releases)
        senders = _common([members, *(release.senders for release in releases)])
        count = int.from_bytes(members, "little").bit_count()
        few = "" if count >= quorum else f"all aggregators have {count} updates, {quorum} are needed"
        return Decision(members, senders, few)


def _common(bits: Iterable[bytes]) -> bytes:
    """The sites that are in all of them."""
    first, *others = bits
    number = reduce(and_, (int.from_bytes(one, "little") for one in others), int.from_bytes(first, "little"))
    return number.to_bytes(len(first), "little")


class ShardsRoute(Route):
    """Sites split updates into shards over several aggregators; the server receives none."""

    kind: Literal["shards"] = "shards"
    aggregators: int = Field(3, ge=2, le=255)
    n_min: int = Field(3, ge=2, description="smallest number of updates that may be averaged together")

    exchanges: ClassVar[tuple[str, ...]] = ("submit", "collect", "settle")
    carries_counts: ClassVar[bool] = True
    settlement: ClassVar[Settlement] = Intersection()

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

    def digest(self, digests: list[bytes]) -> bytes:
        """What stands for a model in the terms of an attempt, from the digests of its shards."""
        return joined(digests)


class AtServer:
    """The server sees phases, counts and metrics."""

    def __init__(self, route: ShardsRoute, seat: ServerSeat) -> None:
        from fl_privacy.round.collector import Collector

        self._settlement, self._cut = route.settlement, route.cut(seat.federation, seat.layout.size)
        self._round = Collector(seat)
        self._shards: list[bytes] = []
        self.finish = self._round.finish

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        self._shards = self._round.shards(run, round)
        return joined(self._shards)

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.wire.client import counts_in

        for index, size in enumerate(self._cut.sizes()):
            self._round.open(index, ask, 0 if ask.farewell else size, shards=self._shards)
        releases, receipts = self._round.collect(ask)
        members, senders, problem = self._settlement.decide(releases, ask.terms.quorum)
        replies = self._round.settle(ask, not problem, members, senders)
        if problem:
            raise RoundFailed(problem)
        outcome = Outcome(int.from_bytes(members, "little").bit_count(), receipts=receipts)
        # The sum is in none of the aggregators' sums, but in all of them together.
        shares = [counts for reply in replies if (counts := counts_in(reply.counts)) is not None]
        if len(shares) == len(replies):
            outcome.counts, outcome.counted = added(shares, ask.counts), replies[0].counted
            outcome.seen = {"counts": np.stack(shares)}
        return outcome

    def confirm(self, ask: Ask) -> None:
        """The aggregators keep the model themselves."""

    def copies(self, ask: Ask) -> int:
        return 0
