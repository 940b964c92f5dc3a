"""What the server sees of a round besides the values: order, labels, invitations, receipts and their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.observed import Observation, observe
from fl_privacy.config import Federation
from fl_privacy.transcript.events import Receipt, Row
from fl_privacy.transcript.read import View

NEVER = -1.0


@dataclass(frozen=True)
class Pairs:
    """One round: for every row and every invited site, what might tell whether the row is the site's.

    `compatible` says whether the row's label is the site's own: labels are public, so they are part of chance.
    """

    round: int
    sites: tuple[str, ...]
    features: NDArray[np.float64]  # rows x sites x features
    compatible: NDArray[np.bool_]  # rows x sites


def gather(view: View, federation: Federation) -> list[Pairs]:
    """The pairs of every round with updates."""
    return [_pairs(seen, view, federation) for seen in observe(view)]


def _pairs(seen: Observation, view: View, federation: Federation) -> Pairs:
    sites, count, events = tuple(sorted(seen.invited)), len(seen.rows), view.events(seen.round)
    named = {event.row: event.name for event in events if isinstance(event, Row)}
    times = {event.name: event.time for event in events if isinstance(event, Receipt)}
    order = sorted(times, key=times.__getitem__)
    begun = min(times.values(), default=0.0)
    features = np.empty((count, len(sites), 8))
    for row in range(count):
        for position, site in enumerate(sites):
            rank, when = (order.index(site), times[site] - begun) if site in times else (NEVER, NEVER)
            told = float(named.get(row) == site)
            features[row, position] = (told, row, row / count, position, row - position, rank, row - rank, when)
    tiers = [federation.site(site).tier if federation.unit else "" for site in sites]
    compatible = np.array([[not label or label == tier for tier in tiers] for label in seen.tiers])
    return Pairs(seen.round, sites, features, compatible | ~compatible.any(axis=1, keepdims=True))
