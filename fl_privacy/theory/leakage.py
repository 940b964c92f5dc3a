"""What an aggregator's view can tell about a site's data: the bound of ERIS, Theorem 3.3 and Corollary D.2.

The bound counts coordinates: it holds where the choice of the coordinates that are sent does not depend on the data
(random sparsification, not top-k), and it is finite only where C_max is, so an update needs noise of its own. The
paper takes the randomness of training for it (Remark D.1), which is an assumption and not a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_privacy.errors import FederationError

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.theory.cost import Cost


def gaussian_capacity(snr: float) -> float:
    """C_max = 1/2 ln(1 + SNR) in nats (Remark D.1): weights and noise are Gaussian with this ratio of variances."""
    if not 0 <= snr < math.inf:
        raise FederationError(f"snr: {snr!r} is not a ratio of variances; use a number of 0 or more")
    return math.log1p(snr) / 2


def bound(
    rounds: int, parameters: int, aggregators: int, kept: float = 1.0, c_max: float = 1.0, colluding: int = 1
) -> float:
    """T (n/A) p C_max A_c: the largest mutual information (Equation 7; with A_c colluding aggregators, Corollary D.2).

    In units of C_max unless it is given. With unequal shards, use the largest as `parameters` and 1 aggregator.
    """
    if rounds < 0 or parameters < 1:
        raise FederationError(f"bound: {rounds} rounds of {parameters} parameters; use 0 or more of at least 1")
    if not 1 <= aggregators <= parameters:
        raise FederationError(f"aggregators: {aggregators} for {parameters} parameters; use from 1 to as many")
    if not 0 < kept <= 1:
        raise FederationError(f"kept: {kept!r} is not a retention probability; use a number above 0 and at most 1")
    if not 1 <= colluding <= aggregators:
        raise FederationError(f"colluding: {colluding} of {aggregators} aggregators; use from 1 to all of them")
    if not c_max >= 0:
        raise FederationError(f"c_max: {c_max!r} is not an information; use a number of 0 or more")
    return rounds * parameters / aggregators * kept * c_max * colluding


@dataclass(frozen=True)
class View:
    """A party that receives updates, and the bound on what it learns of one site in all rounds, in units of C_max."""

    party: str
    count: int  # parties of this kind; several of them together learn at most the sum
    coordinates: float


def views(costs: Iterable[Cost], federation: Federation) -> list[View]:
    """The view of one party of each kind that receives updates. A site may be drawn in every round, so all count."""
    kept = math.prod(step.kept for step in federation.steps)
    shards = ((one, -(-one.observed // federation.cohort)) for one in costs if one.observed)
    return [View(one.name, one.count, bound(federation.rounds, shard, 1, kept)) for one, shard in shards]
