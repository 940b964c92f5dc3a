"""`route: {kind: hierarchical}`: regional aggregators add up their sites' updates, and the server gets regional sums.

A region's sum is float32, which rounds away bits that only its smallest update has. Only under
`reproducible: true` it is exact (`fl_privacy.combine.limbs`), so that the model has the bits of federated averaging.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.combine import limbs
from fl_privacy.errors import FederationError, require
from fl_privacy.routes.base import Route, Trust, tickets
from fl_privacy.routes.ends import ServerEnd, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.routes.parts import Whole
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.topology.graphs import region_sizes
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

PLAIN, EXACT = Coding("sum", "<f4", 0), Coding("exact sum", "<i8", 0)
SUM, COUNT = "sum-", "count-"  # and the name of a region: in the server's record of a round
MOST_REGIONS = 64


class HierarchicalRoute(Route):
    """Sites send updates to the aggregator of their region, and the server gets the sum of each region."""

    kind: Literal["hierarchical"] = "hierarchical"
    regions: (
        Annotated[int, Field(ge=1, le=MOST_REGIONS)]
        | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=MOST_REGIONS)]
    ) = Field(3, description="how many, of nearly equal size, or the size of each; sites are in them in their order")
    n_min: int = Field(3, ge=2, description="fewest organisations whose updates a region may add up and release")

    exchanges: ClassVar[tuple[str, ...]] = ("open", "collect", "settle")
    shows: ClassVar[str] = "sum"
    carries_counts: ClassVar[bool] = True

    @property
    def floor(self) -> int:
        return self.n_min

    @property
    def tolerant(self) -> bool:
        return True

    def parties(self) -> list[tuple[str, str]]:
        return [("region", name) for name in self.middleware()]

    def middleware(self) -> list[str]:
        count = self.regions if isinstance(self.regions, int) else len(self.regions)
        return [f"region-{k}" for k in range(count)]

    def members(self, federation: Federation) -> list[tuple[str, ...]]:
        """The sites of each region."""
        names, first, found = federation.site_names, 0, []
        for size in region_sizes(len(names), self.regions):
            found.append(names[first : first + size])
            first += size
        return found

    def submits_to(self, federation: Federation, site: str) -> list[str]:
        places = zip(self.middleware(), self.members(federation), strict=True)
        return [region for region, sites in places if site in sites]

    def released_with(self, federation: Federation, site: str) -> Sequence[str]:
        return next((sites for sites in self.members(federation) if site in sites), ())

    def trust(self, federation: Federation) -> list[Trust]:
        learn = "every update of its region, and who sent it"
        return [Trust(parties=(name,), learn=learn) for name in self.middleware()]

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        try:
            regions = self.members(federation)
        except FederationError as error:
            yield str(error).replace("topology.", "route.")
            return
        yield from self._too_small(federation, regions)
        yield from self._other_topology(federation)
        if federation.combine.weights != "equal":
            weights = federation.combine.weights
            yield f"combine.weights: {weights!r} needs single updates, and regions give sums; use equal"
        taken = set(self.middleware()) & set(federation.site_names)
        if taken:
            yield f"sites: {sorted(taken)[0]!r} is the name of a region; give the site another one"

    def _too_small(self, federation: Federation, regions: Sequence[Sequence[str]]) -> Iterator[str]:
        """A region must meet its floor in every cohort: all sites that are not in it may be of one region."""
        away = len(federation.sites) - federation.cohort
        whose = {site.name: site.organisation or site.name for site in federation.sites}
        for name, sites in zip(self.middleware(), regions, strict=True):
            organisations = Counter(whose[site] for site in sites)
            left, gone = len(organisations), 0
            for count in sorted(organisations.values()):  # the fewest sites that take most organisations away
                gone += count
                left -= gone <= away
            if left < self.n_min:
                may = "has" if not away else f"in a cohort of {federation.cohort} may have"
                fix = "make the region larger, raise the cohort or lower n_min"
                yield f"route.n_min: {name} {may} {left} of {self.n_min} organisations; {fix}"
                return

    def _other_topology(self, federation: Federation) -> Iterator[str]:
        topology, sizes = federation.topology, region_sizes(len(federation.sites), self.regions)
        if topology is None:
            return
        if topology.kind != "hierarchical":
            yield f"topology.kind: {topology.kind}, and updates travel by regions; use hierarchical, or remove topology"
            return
        try:
            stated = region_sizes(len(federation.sites), topology.given.get("regions", 3))
        except FederationError:
            return  # the topology says so itself
        if stated != sizes:
            yield f"topology.regions: {stated}, and route.regions are {sizes}; give both the same"

    def form(self, federation: Federation) -> Coding:
        """How a sum travels."""
        return EXACT if federation.reproducible else PLAIN

    def sums(self, federation: Federation, recorded: Mapping[str, Payload]) -> dict[str, tuple[int, Vector]]:
        """By region, how many updates the server got the sum of in a round, and this sum: from its record of it."""
        found = {}
        for name in self.middleware():
            if SUM + name in recorded:
                count, data = int(recorded[COUNT + name][0]), np.asarray(recorded[SUM + name])
                found[name] = count, decoded(data, count, int(np.asarray(recorded["model"]).size))
        return found

    def partial_sums(
        self, federation: Federation, recorded: Mapping[str, Payload]
    ) -> list[tuple[Sequence[str], int, Vector]]:
        sums, places = self.sums(federation, recorded), zip(self.middleware(), self.members(federation), strict=True)
        return [(sites, *sums[name]) for name, sites in places if name in sums and sums[name][0] > 0]

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, c, coding = federation.cohort, parameters, federation.bytes_of_counts, federation.coding
        sizes, ticket = region_sizes(len(federation.sites), self.regions), tickets(federation)
        r, calls = len(sizes), len(self.exchanges)
        moved: dict[str, Any] = {"models": (0, r * d), "updates": (r * d, 0), "counts": (r * c, 0)}
        made = cost(FLOAT32, "server", 1, calls * r + ticket * n, **moved)
        costs = [replace(made, observed=0)]
        for name, size in zip(self.middleware(), sizes, strict=True):
            own = min(size, n)
            moved = {"models": (d, own * d), "updates": (own * d, 0), "counts": (own * c, c)}
            region = cost(coding, name, 1, 2 * own + calls, **moved)
            costs.append(replace(_giving(region, d), observed=n * d))  # it sees all of a site's, or nothing
        return [*costs, cost(coding, "site", n, 2 + ticket, models=(d, 0), updates=(0, d), counts=(0, c))]

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, coding, calls = len(federation.sites), parameters, federation.coding, len(self.exchanges)
        sizes = region_sizes(n, self.regions)
        r = len(sizes)
        regions = [
            cost(coding, name, 1, 2 * size + calls, models=(d, size * d), updates=(0, 0))
            for name, size in zip(self.middleware(), sizes, strict=True)
        ]
        return [
            cost(coding, "server", 1, calls * r, models=(0, r * d), updates=(0, 0)),
            *regions,
            cost(coding, "site", n, 2, models=(d, 0), updates=(0, 0)),
        ]

    def site(self, seat: SiteSeat) -> SiteEnd:
        from fl_privacy.round.member import Member

        return Member(seat, Whole())

    def server(self, seat: ServerSeat) -> ServerEnd:
        from fl_privacy.routes.regions import AtServer

        return AtServer(self, seat)


def _giving(region: Cost, parameters: int) -> Cost:
    """With the sum that it releases."""
    sent = FLOAT32.nbytes(parameters)
    return replace(
        region,
        parameters_out=region.parameters_out + parameters,
        bytes_out=region.bytes_out + sent,
        updates=(region.updates[0], sent),
    )


def encoded(rows: Any, exact: bool) -> Payload:
    """The sum of the rows as it travels."""
    if exact:
        return limbs.packed(limbs.summed(np.ascontiguousarray(rows)))
    total = np.zeros(rows.shape[1], np.float64)
    for row in rows:
        total += row
    with np.errstate(over="ignore"):
        made = total.astype(np.float32)
    require(bool(np.isfinite(made).all()), "sum: not finite; a site sends numbers that are too large", "DATA_LOSS")
    return made


def decoded(data: Payload, count: int, parameters: int) -> Vector:
    """A sum that travelled, as numbers."""
    return limbs.mean(limbs.unpacked(data, parameters, count), 1) if data.dtype == np.int64 else data


def mean_of(sums: Sequence[Payload], counts: Sequence[int], parameters: int) -> Vector:
    """The mean of all updates, from the sum of every region."""
    if sums[0].dtype == np.int64:
        parts = [limbs.unpacked(data, parameters, count) for data, count in zip(sums, counts, strict=True)]
        return limbs.mean(limbs.added(parts), sum(counts))
    total = np.zeros(parameters, np.float64)
    for data in sums:
        total += data
    return (total / sum(counts)).astype(np.float32)
