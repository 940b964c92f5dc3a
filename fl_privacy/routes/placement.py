"""Where the aggregators of `route: {kind: shards}` run: `placement: sites`, every client an aggregator (ERIS, 3.2).

A site opens no port, so shards travel by a mailbox: sealed for the site that aggregates them, signed by the one that
sends them, and bound to the attempt. The mailbox cannot read them, nor the shards of the model on their way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from fl_privacy.crypto.keys import KEY_BYTES
from fl_privacy.crypto.sealing import OVERHEAD, TAG
from fl_privacy.errors import RoundFailed
from fl_privacy.round.terms import joined
from fl_privacy.routes.base import Trust, farewells, tickets
from fl_privacy.routes.ends import Ask, Outcome, ServerEnd, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.shard import masks
from fl_privacy.shard.sealed import sizes
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.routes.shards import ShardsRoute

MAILBOX = "mailbox"
ENVELOPE = OVERHEAD + KEY_BYTES  # of the key to a shard of the model, for one site
MOST_SITES, MOST_STATEMENTS = 500, 4_000  # their cards, and what they say about all shards, fit into one message each


class Placement(Protocol):
    """What of a sharded route depends on where its aggregators run."""

    needs_all_sites: bool
    exchanges: tuple[str, ...]

    def parties(self, route: ShardsRoute) -> list[tuple[str, str]]: ...

    def middleware(self, route: ShardsRoute) -> list[str]: ...

    def trust(self, route: ShardsRoute, federation: Federation) -> list[Trust]: ...

    def problems(self, route: ShardsRoute, federation: Federation) -> Iterator[str]: ...

    def cost(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]: ...

    def once(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]: ...

    def site(self, route: ShardsRoute, seat: SiteSeat) -> SiteEnd: ...

    def server(self, route: ShardsRoute, seat: ServerSeat) -> ServerEnd: ...


class AtSites:
    """The first sites of the federation aggregate one shard each."""

    needs_all_sites = True
    exchanges: tuple[str, ...] = ("shard", "open", "collect")

    def parties(self, route: ShardsRoute) -> list[tuple[str, str]]:
        return [(MAILBOX, MAILBOX)]

    def middleware(self, route: ShardsRoute) -> list[str]:
        return [MAILBOX]

    def trust(self, route: ShardsRoute, federation: Federation) -> list[Trust]:
        return [Trust(parties=route.aggregating(federation))]

    def problems(self, route: ShardsRoute, federation: Federation) -> Iterator[str]:
        a, k = route.aggregators, len(federation.sites)
        if a > k:
            yield f"route.aggregators: {a} given for {k} sites, and each site aggregates at most one shard; use {k}"
        if k > MOST_SITES:
            yield f"route.placement: sites supports up to {MOST_SITES} sites, and there are {k}; use processes"
        elif a * k > MOST_STATEMENTS:
            yield f"route.aggregators: {a} at {k} sites are too many to compare; use {MOST_STATEMENTS // k}"
        refused = {
            "settlement: partial": route.settlement != "all",
            "audit": federation.audit,
        }
        fixes = {
            "settlement: partial": "use all, because a site that is gone takes its shard of the model along",
            "audit": "record the run with placement: processes, where aggregators receive the same shards",
        }
        for what, given in refused.items():
            if given:
                yield f"route.placement: sites does not support {what}; {fixes[what]}"
        if not federation.sites_evaluate:
            yield "route.placement: sites leaves the model to the sites, so only they can evaluate; set evaluate: sites"
        if federation.rounds_per_ticket < federation.rounds:
            yield "rounds_per_message: with route.placement sites a site must stay for all rounds; use auto"

    def cost(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]:
        """Per round: a site sends its update and receives the model; one that aggregates also receives its column,
        and sends its shard of the model. With masks per round it receives the model of rounds without it, too.
        """
        a, k, n, d, coding = route.aggregators, len(federation.sites), federation.cohort, parameters, federation.coding
        models = n + (a * (k - n) // k if route.joins_every_round else 0)
        shard, ticket, c = max(masks.sizes(d, a, route.shares)), tickets(federation), federation.bytes_of_counts
        through, counts = (n * d, n * d), (n * a * c + a * c, n * a * c + c)
        (seal,), calls = sizes([0], 0), len(self.exchanges)
        carried = cost(
            coding,
            MAILBOX,
            1,
            4 * k + 4 * a + calls,
            models=(d, models * d),
            updates=through,
            counts=counts,
            sealed_models=(a * (TAG + k * ENVELOPE), models * a * (TAG + ENVELOPE)),
            sealed_updates=(n * a * seal, n * a * seal),
        )
        aggregates = cost(
            coding,
            "site",
            a,
            # fetch, submit, announce, compare; as an aggregator: check, report, apply, share
            8 + ticket,
            models=(d, shard),
            updates=(n * shard, d),
            counts=(n * c, a * c + c),
            sealed_models=(a * (TAG + ENVELOPE), TAG + k * ENVELOPE),
            sealed_updates=(n * seal, a * seal),
            does="aggregates" if a < k else "",
        )
        trains = cost(
            coding,
            "site",
            k - a,
            4 + ticket,
            models=(d, 0),
            updates=(0, d),
            counts=(0, a * c),
            sealed_models=(a * (TAG + ENVELOPE), 0),
            sealed_updates=(0, a * seal),
        )
        return [
            cost(coding, "server", 1, calls + ticket * n, models=(0, 0), updates=(0, 0), counts=(c, 0)),
            replace(carried, observed=0),  # it can read none of them
            aggregates,
            *([trains] if a < k else []),
        ]

    def once(self, route: ShardsRoute, federation: Federation, parameters: int) -> list[Cost]:
        """Sites make the first model from the seed, so round 1 carries none; the counts of the final one come last."""
        a, k, n, d, coding = route.aggregators, len(federation.sites), federation.cohort, parameters, federation.coding
        last, c, calls = farewells(federation), federation.bytes_of_counts, len(self.exchanges)
        carried, counts = (0, (last * k - n) * d), (k * a * c + a * c, k * a * c + c)
        sites = [(a, k * c, a * c + c, "aggregates" if a < k else ""), (k - a, 0, a * c, "")]
        return [
            cost(coding, "server", 1, last * calls, models=(0, 0), updates=(0, 0), counts=(c, 0)),
            cost(coding, MAILBOX, 1, last * (4 * k + 4 * a + calls), models=carried, updates=(0, 0), counts=counts),
            *(
                cost(
                    coding,
                    "site",
                    count,
                    (8 if given else 4) * last,
                    models=((last - 1) * d, 0),
                    updates=(0, 0),
                    counts=(given, taken),
                    does=does,
                )
                for count, given, taken, does in sites
                if count
            ),
        ]

    def site(self, route: ShardsRoute, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.round.resident import Resident

        federation, size = seat.federation, seat.layout.size
        return Resident(seat, route.cut(federation, size), route.parts(federation, size), route.aggregating(federation))

    def server(self, route: ShardsRoute, seat: ServerSeat) -> ServerEnd:
        return AtServer(route, seat)


class AtServer:
    """The server sees phases, counts and metrics, and the digests of shards."""

    def __init__(self, route: ShardsRoute, seat: ServerSeat) -> None:
        from fl_privacy.round.collector import Collector

        self._seat, self._size = seat, seat.layout.size
        self._cut, self._models = (cut(seat.federation, self._size) for cut in (route.cut, route.parts))
        self._item = seat.federation.coding.type.itemsize
        self._round = Collector(seat, everyone=True, stages=2)
        self._shards: list[bytes] = []
        self.finish = self._round.finish

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        self._shards = self._round.shards(run, round) if round else self._first()
        return joined(self._shards)

    def _first(self) -> list[bytes]:
        from fl_privacy.round.resident import along
        from fl_privacy.wire.stream import digest

        return [digest(shard) for shard in along(self._models, 0).split(self._seat.initial())]

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        shards = [0 if ask.farewell else size * self._item for size in self._cut.sizes()]
        length = sum(sizes(shards, ask.counts))
        self._round.open(0, ask, length, shards=self._shards, parameters=self._size)
        (release,), receipts = self._round.collect(ask)
        if release.phase != "closed":
            raise RoundFailed(release.reason or "the aggregating sites did not complete the round")
        seen = {} if release.counts is None else {"counts": release.counts}
        outcome = Outcome(release.count, receipts=receipts, counts=release.counts, counted=release.counted)
        outcome.seen = seen
        return outcome

    def confirm(self, ask: Ask) -> None:
        """The sites keep the model themselves."""

    def copies(self, ask: Ask) -> int:
        return 0
