"""The composed budgets of a whole run, by tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fl_privacy.config import Dpsgd, Federation, Ldp, NoPrivatise
from fl_privacy.dp import gaussian, ldp, sampled
from fl_privacy.dp.ledger import compose
from fl_privacy.tasks.catalog import CATALOG


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
    terms = federation.privatise
    if isinstance(terms, NoPrivatise):
        return []
    found = Counter(site.epsilon for site in federation.sites if site.epsilon is not None)
    made = []
    for epsilon, count in sorted(found.items()):
        if isinstance(terms, Ldp):
            made.append(Tier(epsilon, count, *_of_site(federation, terms, epsilon)))
        else:
            made.append(Tier(epsilon, count, *_of_record(federation, terms, epsilon)))
    return made


def _of_site(federation: Federation, terms: Ldp, epsilon: float) -> tuple[float, float, str]:
    """Gaussians compose exactly."""
    sigma = gaussian.sigma(epsilon, terms.delta) / federation.rounds**0.5
    return ldp.scale(terms.clip, epsilon, terms.delta), gaussian.epsilon(sigma, terms.delta), ldp.UNIT


def _of_record(federation: Federation, terms: Dpsgd, epsilon: float) -> tuple[float, float, str]:
    """Composed the same way as in the ledger."""
    entry, train = CATALOG[federation.task.dataset], federation.task.train
    shares = len(entry.sites) if federation.task.partition.kind == "by-site" else len(federation.sites)
    plan = sampled.plan(max(1, entry.train // shares), train.epochs, train.batch_size, terms.clip, epsilon, terms.delta)
    composed = compose([plan.charge] * federation.rounds, terms.delta)
    return plan.noise * plan.clip / plan.batch, composed, sampled.UNIT
