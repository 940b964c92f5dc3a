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
    `unit` is what is protected. For records, the noise is that of one step at a site of average size.
    """

    epsilon: float
    sites: int
    scale: float
    composed: float
    unit: str


def tiers(federation: Federation) -> list[Tier]:
    """The tiers in order of epsilon. A site may be drawn in every round, so all rounds count."""
    if federation.unit is None:
        return []
    found = Counter(site.epsilon for site in federation.sites if site.epsilon is not None)
    return [
        Tier(epsilon, count, *federation.privatise.over_run(federation, epsilon), federation.unit)
        for epsilon, count in sorted(found.items())
    ]
