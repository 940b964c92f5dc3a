"""`route: {kind: gossip}`: sites average their models with those of their neighbours in `topology`. Simulation only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_privacy.errors import FederationError
from fl_privacy.peers import quantised
from fl_privacy.peers.exchange import Exchange
from fl_privacy.peers.graph import Neighbours
from fl_privacy.routes.peers import Moment, PeersRoute
from fl_privacy.theory.cost import Cost, cost

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.config.topology import Topology


class GossipRoute(PeersRoute):
    """Every site sends its model to its neighbours in `topology`, and averages what it gets. Simulation only."""

    kind: Literal["gossip"] = "gossip"
    mixing: float = Field(1.0, gt=0, le=1, description="step towards the mean of the neighbours; 1: all the way")

    learns: ClassVar[str] = "the models of its neighbours in each round, and from whom they are"

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        topology = federation.topology
        if topology is None:
            yield "topology: route gossip sends along its edges, and there is none; add topology: {kind: ring}"
            return
        try:
            nodes = topology.graph(federation).nodes(data="role")
        except FederationError:
            return  # the topology says so itself
        if others := sorted(str(node) for node, role in nodes if role != "site"):
            fix = "use ring, line, erdos-renyi, barabasi-albert, or a star around a site"
            yield f"topology.kind: {topology.kind} has {others[0]}, and on route gossip there are only sites; {fix}"

    def neighbours(self, federation: Federation) -> dict[str, list[str]]:
        """Of every site."""
        graph, names = _topology(federation).graph(federation), federation.site_names
        return {name: sorted(names[other] for other in graph[number]) for number, name in enumerate(names)}

    def exchange(self, at: Moment) -> Exchange:
        """Metropolis's weights keep the mean of all models, whatever the degrees; nothing is quantised."""
        around, row = self.neighbours(at.federation), {name: row for row, name in enumerate(at.names)}
        graph: Neighbours = [sorted(row[other] for other in around[name]) for name in at.names]
        trained = at.models + at.updates
        return quantised.exchange(trained, list(trained), graph, self.mixing)

    def volume(self, federation: Federation, parameters: int) -> tuple[int, int, int]:
        """Of a site of the largest degree."""
        most = max(map(len, self.neighbours(federation).values()))
        return most, most * parameters, parameters

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        """Sites of one degree have the same."""
        degrees, found = Counter(map(len, self.neighbours(federation).values())), []
        for degree, count in sorted(degrees.items()):
            sent, name = degree * parameters, f"site of degree {degree}"
            made = cost(self.coding(), name, count, 2 * degree, models=(0, 0), updates=(sent, sent))
            found.append(replace(made, observed=parameters * federation.cohort))
        return found

    def published(self, federation: Federation, size: int, rate: float) -> float | None:
        return None


def _topology(federation: Federation) -> Topology:
    assert federation.topology is not None  # checked when the config was read
    return federation.topology
