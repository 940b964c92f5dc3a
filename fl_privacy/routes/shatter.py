"""`route: {kind: shatter}`: chunks of models travel between virtual nodes (Biswas et al. 2025). Simulation only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fl_privacy.peers import graph, shatter
from fl_privacy.peers.exchange import Exchange, pieces
from fl_privacy.routes.peers import Moment, PeersRoute

if TYPE_CHECKING:
    from fl_privacy.config import Federation

STREAM = 0x5348_4154


class ShatterRoute(PeersRoute):
    """Every site runs virtual nodes, which send a chunk of its model each to random others. Simulation only."""

    kind: Literal["shatter"] = "shatter"
    chunks: int = Field(8, ge=1, le=2**16, description="virtual nodes per site")
    degree: int = Field(4, ge=1, description="virtual nodes that each of them sends its chunk to")

    shows_senders: ClassVar[bool] = False
    learns: ClassVar[str] = "chunks of other sites' models, without the names of the sites"

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if problem := graph.impossible(self.chunks * len(federation.sites), self.degree):
            yield f"route.degree: {problem}"

    def exchange(self, at: Moment) -> Exchange:
        """A new random graph for every round, from the public seed."""
        virtual, seed = self.chunks * len(at.names), at.federation.seed
        overlay = graph.regular(virtual, self.degree, (STREAM, seed, at.ask.round))
        return shatter.exchange(at.models + at.updates, pieces(at.layout.size, self.chunks, seed), overlay)

    def volume(self, federation: Federation, parameters: int) -> tuple[int, int, int]:
        sent = self.degree * parameters
        return self.degree * self.chunks, sent, -(-sent // len(federation.sites))  # on average over the graphs

    def setting(self, federation: Federation) -> dict[str, Any]:
        return {"degree": self.degree} if self.degree < len(federation.sites) else {}
