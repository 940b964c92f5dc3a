"""`route: {kind: shuffler}`: the server gets a mixture that does not reveal who sent what, when or in what order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field

from fl_privacy.coding import FLOAT32
from fl_privacy.errors import RoundFailed
from fl_privacy.routes.base import Route, Trust, by_parameter, tickets
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.routes.parts import Whole
from fl_privacy.shuffle import buckets
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class Group(NamedTuple):
    """Updates shuffled together: their indices, and the tier label of each row of the mixture."""

    members: tuple[int, ...]
    tiers: tuple[str, ...]


class ShufflerRoute(Route):
    """Sites send updates to the shuffler, which gives the server a mixture."""

    kind: Literal["shuffler"] = "shuffler"
    level: Literal["model", "layer", "parameter"] = "parameter"
    n_min: int = Field(3, ge=2, description="fewest organisations whose updates may be mixed and released together")
    buckets: Literal["none", "published", "levelled"] = Field(
        "none",
        description="mix only within budget buckets: with IntraShuffler's merge, or with noise levelled per bucket",
    )
    label: Literal["min", "mean"] = Field("min", description="which epsilon labels a merged bucket")

    exchanges: ClassVar[tuple[str, ...]] = ("open", "collect", "settle")
    carries_counts: ClassVar[bool] = True

    @property
    def floor(self) -> int:
        return self.n_min

    @property
    def mixed_by(self) -> str:
        return self.level

    def parties(self) -> list[tuple[str, str]]:
        return [("shuffler", "shuffler")]

    def middleware(self) -> list[str]:
        return ["shuffler"]

    def trust(self, federation: Federation) -> list[Trust]:
        return [Trust(parties=("shuffler",))]

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if self.level != "model":
            yield from by_parameter(federation, f"shuffling by {self.level}")
        if self.buckets == "none":
            yield from self._tiers_alone(federation)
            return
        kind = federation.privatise.kind
        if federation.unit is None:
            yield f"route.buckets: {self.buckets!r} needs budgets, and privatise.kind is none; use ldp or dpsgd"
        elif self.buckets == "levelled" and not federation.privatise.after_training:
            yield f"route.buckets: 'levelled' needs noise on the update, and {kind} adds it in training; use published"
        elif self.buckets == "levelled" and federation.coding != FLOAT32:
            name = federation.coding.name
            yield f"route.buckets: 'levelled' adds noise to float32, and updates are {name}; use published"

    def _tiers_alone(self, federation: Federation) -> Iterator[str]:
        """Whole models are mixed within their tier, so every cohort needs enough organisations of each of its tiers."""
        if self.level != "model":
            return
        away = len(federation.sites) - federation.cohort  # all of them may be of one tier
        tiers = {site.tier for site in federation.sites}
        for tier in sorted(tiers, key=lambda tier: float(tier or 0)):
            few = len({one.organisation or one.name for one in federation.sites if one.tier == tier}) - away
            if tier and few < self.n_min:
                short = f"a cohort may have {max(few, 1)} of the {self.n_min} organisations with epsilon {tier}"
                yield f"route.level: 'model' mixes each tier by itself, and {short}; use buckets: published"
                return

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, coding, ticket = federation.cohort, parameters, federation.coding, tickets(federation)
        c, calls = federation.bytes_of_counts, len(self.exchanges)
        return [
            cost(coding, "server", 1, calls + ticket * n, models=(0, d), updates=(n * d, 0), counts=(c, 0)),
            cost(coding, "shuffler", 1, 2 * n + calls, models=(d, n * d), updates=(n * d, n * d), counts=(n * c, c)),
            cost(coding, "site", n, 2 + ticket, models=(d, 0), updates=(0, d), counts=(0, c)),
        ]

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, coding, calls = len(federation.sites), parameters, federation.coding, len(self.exchanges)
        return [
            cost(coding, "server", 1, calls, models=(0, d), updates=(0, 0)),
            cost(coding, "shuffler", 1, 2 * n + calls, models=(d, n * d), updates=(0, 0)),
            cost(coding, "site", n, 2, models=(d, 0), updates=(0, 0)),
        ]

    def recombinations(self, parameters: int) -> float | None:
        """log10 of the candidates for one update in the smallest set released; None unless parameters are mixed."""
        from fl_privacy.theory.recombination import one_update

        return one_update(self.n_min, parameters) if self.level == "parameter" else None

    def together(self, tiers: Sequence[str], organisations: Sequence[str], least: int) -> list[tuple[int, ...]]:
        return [group.members for group in self.groups(tiers, organisations, least)]

    def groups(self, tiers: Sequence[str], organisations: Sequence[str] = (), least: int = 0) -> list[Group]:
        """The mixing sets of a round; each site is its own organisation unless these are given.

        Buckets: IntraShuffler's (Algorithm 1), of at least `n_min` organisations, or `least` if that is more. Whole
        models keep their tier, so each tier is its own set (Shuffle-DP). Otherwise all are mixed, and the labels, in
        ascending order, say nothing about the rows at which they stand (Table 4's "No Bucket").
        """
        everyone = tuple(range(len(tiers)))
        if not any(tiers):
            return [Group(everyone, ("",) * len(tiers))]
        if self.buckets != "none":
            made = buckets.form([float(t) for t in tiers], max(self.n_min, least), self.label, organisations)
            return [Group(b.members, (f"{b.epsilon:g}",) * len(b.members)) for b in made]
        if self.level == "model":
            equal = {tier: tuple(i for i in everyone if tiers[i] == tier) for tier in tiers}
            return [Group(equal[tier], (tier,) * len(equal[tier])) for tier in sorted(equal, key=float)]
        return [Group(everyone, tuple(sorted(tiers, key=float)))]

    def missing(self, federation: Federation, tiers: Sequence[str]) -> list[float]:
        """The noise that raises each row of a set to that of its smallest budget: then variances tell no rows apart."""
        if self.buckets != "levelled":
            return []
        budgets = [float(tier) for tier in tiers]
        return [federation.privatise.missing(federation, budget, min(budgets)) for budget in budgets]

    def site(self, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.round.member import Member

        return Member(seat, Whole(), layers=[part.stop for part in seat.layout.layers])

    def server(self, seat: ServerSeat) -> AtServer:
        return AtServer(seat)


class AtServer:
    """Sends the model when it opens a round, and receives the mixture."""

    def __init__(self, seat: ServerSeat) -> None:
        from fl_privacy.round.collector import Collector

        self._length = seat.federation.coding.length(seat.layout.size)
        self._layers = [part.stop for part in seat.layout.layers]
        self._round = Collector(seat)
        self.confirm, self.finish = self._round.confirm, self._round.finish

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        from fl_privacy.wire.stream import digest

        assert model is not None
        return digest(model)

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        length, layers = (0, ()) if ask.farewell else (self._length, self._layers)
        self._round.open(0, ask, length, model, layers)
        (release,), receipts = self._round.collect(ask)
        if release.rows is None:
            raise RoundFailed(release.reason or "the shuffler released nothing")
        rows, size = None if ask.farewell else release.rows, release.rows.nbytes
        seen = {} if release.counts is None else {"counts": release.counts}
        return Outcome(release.count, rows, release.tiers, receipts, size, release.counts, release.counted, seen)

    def copies(self, ask: Ask) -> int:
        return 1
