"""What the sites' budgets come to over a whole run, by tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fl_privacy.config import Federation, Ldp
from fl_privacy.dp import gaussian, ldp


@dataclass(frozen=True)
class Tier:
    """A budget of the public grid: who has it, its noise, and its epsilon a round and after all rounds.

    A tier with one site is a name: buckets hide it only where they merge it with others.
    """

    epsilon: float
    sites: int
    scale: float
    composed: float


def tiers(federation: Federation) -> list[Tier]:
    """By rising epsilon; a site may be drawn in every round, so all rounds count. Gaussians compose exactly."""
    terms = federation.privatise
    if not isinstance(terms, Ldp):
        return []
    found = Counter(site.epsilon for site in federation.sites if site.epsilon is not None)
    made = []
    for epsilon, count in sorted(found.items()):
        sigma = gaussian.sigma(epsilon, terms.delta) / federation.rounds**0.5
        scale = ldp.scale(terms.clip, epsilon, terms.delta)
        made.append(Tier(epsilon, count, scale, gaussian.epsilon(sigma, terms.delta)))
    return made
