"""What parties saw of a round: models by name, or rows of which nobody says whose they are, or only their mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.fetched import Models
from attacks.common.observed import budget, invited
from attacks.membership import seen
from attacks.membership.run import completed
from fl_privacy.config import Federation
from fl_privacy.rns.residues import Residues
from fl_privacy.transcript.read import View

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bucket:
    """Rows that were mixed with one another, and the sites whose updates they are, in no known order."""

    rows: Ints
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Sight:
    """One round: the model before it, who took part, and the updates: by name, as rows of a mixture, their mean."""

    round: int
    model: Vector
    sites: tuple[str, ...]
    mean: Vector
    named: Mapping[str, Vector] | None = None  # of all sites
    rows: Matrix | None = None
    buckets: Sequence[Bucket] = ()
    sums: Residues | None = None  # of residues, where updates are encoded


def observe(views: Mapping[str, View], federation: Federation, models: Models, parameters: int) -> Iterator[Sight]:
    """Every round in which these parties saw something of the updates."""
    for one in seen.observe(views, federation, models, parameters):
        sites = tuple(name for name in federation.site_names if name in one.parts)
        if all(part.members == 1 for part in one.parts.values()):
            named = {name: completed(one.parts[name], one.model, one.after) - one.model for name in sites}
            mean = np.asarray(np.mean(list(named.values()), axis=0), np.float32)
            yield Sight(one.round, one.model, sites, mean, named=named)
            continue
        sites = invited(views, one.round) or sites
        sent = _rows(views, federation, one.round, parameters)
        if sent is None:
            part = min(one.parts.values(), key=lambda part: part.members)
            mean = np.asarray(completed(part, one.model, one.after) - one.model, np.float32)
            yield Sight(one.round, one.model, sites, mean, sums=summed(views, federation, one.round, parameters))
            continue
        rows, tiers = sent
        mean = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        yield Sight(one.round, one.model, sites, mean, rows=rows, buckets=buckets(federation, sites, tiers))


def buckets(federation: Federation, sites: Sequence[str], tiers: Sequence[str]) -> list[Bucket]:
    """The rows by label, and the sites whose own budget leads there: to the largest label not above it."""
    labels = np.array([budget(tier) for tier in tiers])
    found: dict[float, list[str]] = {label: [] for label in sorted(set(labels.tolist()))}
    for name in sites:
        own = federation.site(name).budget or np.inf
        found[max((label for label in found if label <= own), default=min(found))].append(name)
    return [Bucket(np.flatnonzero(labels == label), tuple(names)) for label, names in found.items() if names]


def summed(views: Mapping[str, View], federation: Federation, round: int, parameters: int) -> Residues | None:
    """The sum of the residues that the server received in a round; None where it got no residues."""
    view = views.get("server")
    if view is None or round not in view.rounds:
        return None
    return federation.route.summed(federation, parameters, view.round(round).arrays)


def _rows(
    views: Mapping[str, View], federation: Federation, round: int, parameters: int
) -> tuple[Matrix, list[str]] | None:
    """The rows that the server received, with their labels; None if it received none, or nothing but their sum."""
    view = views.get("server")
    if view is None or round not in view.rounds or federation.route.shows != "rows":
        return None
    arrays, tiers = view.round(round)
    if "updates" not in arrays or len(arrays["updates"]) < 2:
        return None
    rows = federation.coding.decoder(parameters).decode(arrays["updates"], [], round)
    return rows, [str(tier) for tier in tiers] if len(tiers) == len(rows) else [""] * len(rows)
