"""The composed budgets of a whole run, by tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_privacy.config import Federation


@dataclass(frozen=True)
class Tier:
    """A budget of the public grid: its number of sites, its noise, and its epsilon per round and after all rounds.

    A tier with only one site identifies that site, unless buckets merge it with others.
    `unit` is what is protected, `adjacency` how neighbours differ. For records, the noise (of one step) and an epsilon
    that the config does not give are those of a site of average size.
    """

    tier: str
    epsilon: float
    sites: int
    scale: float
    composed: float
    unit: str
    adjacency: str
    delta: float


def tiers(federation: Federation) -> list[Tier]:
    """The tiers in order of their budgets. A site may be drawn in every round, so all rounds count."""
    kind = federation.privatise
    if kind.unit is None or kind.adjacency is None or kind.at_delta is None:
        return []
    terms = kind.unit, kind.adjacency, kind.at_delta
    found = Counter((site.budget, site.tier) for site in federation.sites if site.budget is not None)
    return [
        Tier(
            tier,
            epsilon_after(federation, budget, 1),
            count,
            kind.noise(federation, budget),
            epsilon_after(federation, budget, federation.rounds),
            *terms,
        )
        for (budget, tier), count in sorted(found.items())
    ]


def epsilon_after(federation: Federation, budget: float, rounds: int) -> float:
    """Epsilon of so many rounds at a site with this budget: as given, or else by the accountant."""
    if rounds == federation.budget_rounds:
        return budget
    return federation.privatise.epsilon_after(federation, budget, rounds)
