"""How an attacker deals out its own records among shadow sites.

A matched prior is the one by which the target was made. A mismatched one is all that somebody without native labels
has: the records dealt out by Dirichlet draws, whatever the position of a site.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.partition import coupled_shares, rounded
from fl_privacy.tasks.standard import coupling_of

MATCHED, MISMATCHED = "matched", "mismatched"
ALPHA = 0.5  # of the draws of a mismatched prior

Shares = NDArray[np.float64]


def kinds(federation: Federation) -> tuple[str, ...]:
    """Both where they differ."""
    placed = federation.task.by_site or federation.task.partition.dealing == "coupled"
    return (MATCHED, MISMATCHED) if placed else (MATCHED,)


def sensitive(classes: int) -> int:
    """The class whose share at a site is asked for: the second of two (ill), else the first."""
    return 1 if classes == 2 else 0


def concentration(data: Dataset, classes: int) -> float:
    """p_i: the share of a site's records that are of the sensitive class."""
    return float((data.y == sensitive(classes)).mean()) if len(data) else 0.0


def deal(federation: Federation, proxy: Dataset, prior: str, rng: np.random.Generator) -> list[Dataset]:
    """One shadow federation: the records of every site, drawn with replacement from the attacker's own."""
    sizes = public_sizes(federation)
    if prior == MATCHED and federation.task.by_site:
        return [proxy.take(rng.choice(_centre(federation, proxy, i), size)) for i, size in enumerate(sizes)]
    classes = federation.task.data_set.classes
    by_class = [np.flatnonzero(proxy.y == label) for label in range(classes)]
    found = []
    for shares, size in zip(_shares(federation, prior, len(sizes), classes, rng), sizes, strict=True):
        counts = rounded(shares, size)
        rows = [rng.choice(by_class[label], count) for label, count in enumerate(counts) if len(by_class[label])]
        found.append(proxy.take(np.concatenate(rows)))
    return found


def _shares(federation: Federation, prior: str, sites: int, classes: int, rng: np.random.Generator) -> Shares:
    chosen = federation.task.partition
    if prior == MISMATCHED:
        return rng.dirichlet(np.full(classes, ALPHA), sites)
    if chosen.dealing == "coupled":
        return coupled_shares(sites, classes, chosen.alpha, coupling_of(federation), rng)
    if chosen.dealing == "dirichlet":
        return rng.dirichlet(np.full(classes, chosen.alpha), sites)
    return np.full((sites, classes), 1 / classes)


def public_sizes(federation: Federation) -> tuple[int, ...]:
    """How many records everybody believes a site to have."""
    if federation.topology is not None and federation.topology.records is not None:
        return federation.topology.records
    if federation.task.partition.sizes is not None:
        return federation.task.partition.sizes
    return (federation.task.typical_records(len(federation.sites)),) * len(federation.sites)


def _centre(federation: Federation, proxy: Dataset, number: int) -> NDArray[np.int64]:
    """Records of the centre behind a site."""
    sites = federation.task.data_set.sites
    centre = sites.index(federation.task.centre(federation.site_names[number], number))
    assert proxy.site is not None
    return np.flatnonzero(proxy.site == centre)
