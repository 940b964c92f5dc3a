"""Partition pooled records among the sites: disjoint, complete, and with no site left empty."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.tasks.data import Labels

Kind = Literal["iid", "dirichlet", "coupled", "by-site"]
Rows = NDArray[np.int64]
Shares = NDArray[np.float64]

FEWEST = 10
ROUNDING = 1e-9
# Separates this stream from others with the same seed.
STREAM = 0x5041_5254


@dataclass(frozen=True)
class Coupling:
    """How far a site's position decides its classes: phi(i) of every site (default: its number), and records."""

    eta: float = 0.5
    phi: Sequence[int] | None = None
    sizes: Sequence[int] | None = None


def partition(
    y: Labels,
    sites: int,
    kind: Kind,
    seed: int,
    alpha: float = 0.5,
    site: NDArray[np.int64] | None = None,
    records: int | None = None,
    coupling: Coupling | None = None,
) -> list[Rows]:
    """The rows of each site, ascending; deterministic for the same arguments. A site gets `records` at most."""
    if not 1 <= sites <= len(y):
        raise FederationError(f"sites: {sites} cannot share {len(y)} records; use 1 to {len(y)}")
    rng = np.random.default_rng(np.random.SeedSequence([STREAM, seed]))
    ways: dict[str, Callable[[], list[Rows]]] = {
        "iid": lambda: deal_iid(len(y), sites, rng),
        "dirichlet": lambda: deal_dirichlet(y, sites, alpha, rng),
        "coupled": lambda: deal_coupled(y, sites, alpha, coupling or Coupling(), records, rng),
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


def coupled_shares(sites: int, classes: int, alpha: float, coupling: Coupling, rng: np.random.Generator) -> Shares:
    """(1 - eta) Dirichlet(alpha) + eta on class phi(i) mod K: class shares by site (Rangwala et al. 2026, VI-A)."""
    phi = np.arange(sites) if coupling.phi is None else np.asarray(coupling.phi)
    drawn = rng.dirichlet(np.full(classes, alpha), sites)
    return (1 - coupling.eta) * drawn + coupling.eta * np.eye(classes)[phi % classes]


def deal_coupled(
    y: Labels, sites: int, alpha: float, coupling: Coupling, records: int | None, rng: np.random.Generator
) -> list[Rows]:
    """Disjoint sites with these class shares, all smaller in proportion where a class would run out.

    Records that fit no share are left over: topping sites up with them would undo the coupling.
    """
    if np.issubdtype(y.dtype, np.floating):
        raise FederationError("task.partition.kind: coupled needs classes, not forecasts; use by-site or iid")
    labels, there = np.unique(y, return_counts=True)
    sizes = np.full(sites, records or len(y) // sites) if coupling.sizes is None else np.asarray(coupling.sizes)
    if len(sizes) != sites:
        raise FederationError(f"task.partition.sizes: {len(sizes)} values for {sites} sites; give one per site")
    shares = coupled_shares(sites, len(labels), alpha, coupling, rng)
    scale = min(1.0, float((there / np.maximum((shares * sizes[:, None]).sum(axis=0), 1e-12)).min()))
    while True:
        counts = np.stack(
            [rounded(share, max(1, int(size * scale))) for share, size in zip(shares, sizes, strict=True)]
        )
        if (counts.sum(axis=0) <= there).all():
            break
        scale *= 0.99  # rounding asked for a few too many
        if scale * sizes.max() < 1:
            raise FederationError("task.partition: a class has too few records for so many sites; raise alpha")
    pieces = []
    for label, wanted in zip(labels, counts.T, strict=True):
        rows = rng.permutation(np.flatnonzero(y == label))
        pieces.append(np.split(rows, np.cumsum(wanted))[:-1])
    return [np.concatenate(part).astype(np.int64) for part in zip(*pieces, strict=True)]


def rounded(shares: NDArray[np.float64], count: int) -> Rows:
    """Whole numbers that add up to `count`, in these shares: largest remainders."""
    exact = shares * count
    found = np.floor(exact + ROUNDING).astype(np.int64)
    order = np.argsort(found - exact, kind="stable")
    found[order[: count - int(found.sum())]] += 1
    return found


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
