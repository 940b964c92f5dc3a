"""`route: {kind: ako}`: partial gradient exchange (Watcharapichat et al. 2016). Simulation only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fl_privacy.peers import ako
from fl_privacy.peers.exchange import Exchange, pieces
from fl_privacy.routes.peers import Moment, PeersRoute
from fl_privacy.theory.distribution import PARTITIONS

if TYPE_CHECKING:
    from fl_privacy.config import Federation


class AkoRoute(PeersRoute):
    """Every site sends every other one partition of its accumulated updates, another one each round. Simulation only.

    With one partition, all sites have FedAvg's model.
    """

    kind: Literal["ako"] = "ako"
    partitions: int = Field(PARTITIONS, ge=1, le=2**16, description="of an update; a round sends one of them")

    sends_models: ClassVar[bool] = False
    learns: ClassVar[str] = "a partition of every other site's latest updates in each round, and from whom it is"

    def exchange(self, at: Moment) -> Exchange:
        partitions = pieces(at.layout.size, self.partitions, at.federation.seed)
        return ako.exchange(at.models, at.updates, partitions, at.ask.round, at.kept)

    def volume(self, federation: Federation, parameters: int) -> tuple[int, int, int]:
        others, partition = len(federation.sites) - 1, -(-parameters // self.partitions)
        return others, others * partition, partition

    def setting(self, federation: Federation) -> dict[str, Any]:
        return {"partitions": self.partitions}
