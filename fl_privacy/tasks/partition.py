"""Partition pooled records among the sites: disjoint, complete, and with no site left empty."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.tasks.data import Labels

Kind = Literal["iid", "dirichlet", "by-site"]
Rows = NDArray[np.int64]

FEWEST = 10
# Separates this stream from others with the same seed.
STREAM = 0x5041_5254


def partition(
    y: Labels,
    sites: int,
    kind: Kind,
    seed: int,
    alpha: float = 0.5,
    site: NDArray[np.int64] | None = None,
    records: int | None = None,
) -> list[Rows]:
    """The rows of each site, ascending; deterministic for the same arguments. A site gets `records` at most."""
    if not 1 <= sites <= len(y):
        raise FederationError(f"sites: {sites} cannot share {len(y)} records; use 1 to {len(y)}")
    rng = np.random.default_rng(np.random.SeedSequence([STREAM, seed]))
    ways: dict[str, Callable[[], list[Rows]]] = {
        "iid": lambda: deal_iid(len(y), sites, rng),
        "dirichlet": lambda: deal_dirichlet(y, sites, alpha, rng),
        "by-site": lambda: deal_by_site(site, sites),
    }
    deal = ways.get(kind)
    if deal is None:
        raise FederationError(f"task.partition.kind: {kind!r} is unknown; use {', '.join(ways)}")
    return [np.sort(rows[:records]) for rows in deal()]


def deal_iid(count: int, sites: int, rng: np.random.Generator) -> list[Rows]:
    """Shuffle and split into near-equal parts."""
    return np.array_split(rng.permutation(count), sites)


def deal_dirichlet(y: Labels, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Split each class by its own draw from a symmetric Dirichlet(alpha), then top up small sites."""
    if not (math.isfinite(alpha) and alpha > 0):
        raise FederationError(f"task.partition.alpha: {alpha} is not a positive number; use 0.5, or less for more skew")
    if np.issubdtype(y.dtype, np.floating):
        raise FederationError("task.partition.kind: dirichlet needs classes, not forecasts; use by-site or iid")
    parts: list[list[Rows]] = [[] for _ in range(sites)]
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        cuts = np.cumsum(rng.dirichlet(np.full(sites, alpha)))[:-1] * len(rows)
        for part, piece in zip(parts, np.split(rows, cuts.astype(np.int64)), strict=True):
            part.append(piece)
    return top_up([rng.permutation(np.concatenate(part)) for part in parts], fewest(len(y), sites))


def fewest(count: int, sites: int) -> int:
    """Ten records per site, or half an equal share if that is less, but at least one."""
    return max(1, min(FEWEST, count // (2 * sites)))


def top_up(parts: list[Rows], minimum: int) -> list[Rows]:
    """Move records one at a time from the largest site until every site has `minimum`.

    A draw with small alpha often leaves a site empty. Redrawing might never end; this moves at most `minimum` records
    per site, and a giver never falls below the minimum while the mean is above it.
    """
    held = [part.tolist() for part in parts]
    richest = [(-len(rows), i) for i, rows in enumerate(held)]
    heapq.heapify(richest)
    for rows in held:
        while len(rows) < minimum:
            _, giver = heapq.heappop(richest)
            rows.append(held[giver].pop())
            heapq.heappush(richest, (-len(held[giver]), giver))
    return [np.array(rows, dtype=np.int64) for rows in held]


def deal_by_site(site: NDArray[np.int64] | None, sites: int) -> list[Rows]:
    """One part per centre of the data, in order."""
    if site is None:
        raise FederationError("task.partition.kind: by-site needs a data set with natural sites; use iid or dirichlet")
    centres, sizes = np.unique(site, return_counts=True)
    if len(centres) != sites:
        raise FederationError(f"sites: by-site has {len(centres)} centres, not {sites}; use sites: {len(centres)}")
    return np.split(np.argsort(site, kind="stable"), np.cumsum(sizes)[:-1])
