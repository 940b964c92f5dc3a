"""`route: {kind: q-dpsgd-1}`: gossip in quantised models with private training (Ding et al. 2021). Simulation only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fl_privacy.coding import Coding
from fl_privacy.peers import graph, quantised
from fl_privacy.peers.exchange import Exchange
from fl_privacy.routes.peers import Moment, PeersRoute
from fl_privacy.theory.distribution import NEIGHBOURS

if TYPE_CHECKING:
    from fl_privacy.config import Federation

STREAM = 0x5144_5053
FLOAT_BITS = 32


@dataclass(frozen=True)
class Bits(Coding):
    """So many bits per parameter, packed."""

    bits: int = FLOAT_BITS

    def nbytes(self, parameters: int) -> int:
        return -(-self.bits * parameters // 8)


class QDpsgd1Route(PeersRoute):
    """Sites train privately, and average their models with the quantised ones of neighbours. Simulation only."""

    kind: Literal["q-dpsgd-1"] = "q-dpsgd-1"
    degree: int = Field(0, ge=0, description="neighbours of a site; default (0): about 0.4 of the others")
    levels: int = Field(31, ge=1, le=2**16, description="levels above 0 of the quantisation; 31: 6 bits with the sign")
    mixing: float = Field(1.0, gt=0, le=1, description="step towards the mean of the neighbours; 1: all the way")

    learns: ClassVar[str] = "the quantised models of its neighbours in each round, and from whom they are"

    def neighbours(self, federation: Federation) -> int:
        """As many as the config says, or the even number that is next to ERIS's 0.4 (K - 1)."""
        others = len(federation.sites) - 1
        return self.degree or min(others, 2 * math.ceil(NEIGHBOURS * others / 2))

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if federation.unit is None:
            yield "route.kind: q-dpsgd-1 exchanges noisy models, and privatise.kind is none; use dpsgd or ldp"
        if federation.compress.kind != "none":
            yield f"compress.kind: {federation.compress.kind} with route q-dpsgd-1, which quantises itself; use none"
        if problem := graph.impossible(len(federation.sites), self.neighbours(federation)):
            yield f"route.degree: {problem}"

    def exchange(self, at: Moment) -> Exchange:
        """The graph is drawn from the public seed, and fixed for the run."""
        seed, degree = at.federation.seed, self.neighbours(at.federation)
        neighbours = graph.regular(len(at.names), degree, (STREAM, seed), connected=degree > 1)
        trained, tensors = at.models + at.updates, list(at.layout.slices.values())
        keys = (at.key(peer, "quantise") for peer in range(len(at.names)))
        sent = [quantised.quantised(own, tensors, self.levels, key) for own, key in zip(trained, keys, strict=True)]
        return quantised.exchange(trained, sent, neighbours, self.mixing)

    def coding(self) -> Coding:
        return Bits("quantised", bits=self._bits)

    def volume(self, federation: Federation, parameters: int) -> tuple[int, int, int]:
        neighbours = self.neighbours(federation)
        return neighbours, neighbours * parameters, parameters

    def setting(self, federation: Federation) -> dict[str, Any]:
        return {"degree": self.neighbours(federation), "ratio": min(1.0, self._bits / FLOAT_BITS)}

    @property
    def _bits(self) -> int:
        return 1 + self.levels.bit_length()
