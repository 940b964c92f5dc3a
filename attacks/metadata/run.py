"""What the server sees of a round besides the values: order, labels, invitations, receipts and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attacks.common.observed import Observation, observe
from fl_privacy.config import Federation
from fl_privacy.transcript.events import Event, Receipt, Row
from fl_privacy.transcript.read import View

NEVER = -1.0
Grid = NDArray[np.float64]


@dataclass(frozen=True)
class Pairs:
    """One round: for every row and every invited site, what might tell whether the row is the site's.

    `compatible` says which sites the row may be of by what is public by design: the label of its mixing set.
    `replies` has what is known of each site's reply: when it came, and as which, by the records of two rounds.
    """

    round: int
    sites: tuple[str, ...]
    features: Grid  # rows x sites x features
    compatible: NDArray[np.bool_]  # rows x sites
    replies: Grid  # sites x 4

    @property
    def replied(self) -> NDArray[np.bool_]:
        return np.asarray((self.replies != NEVER).any(axis=1))


def gather(view: View, federation: Federation) -> list[Pairs]:
    """The pairs of every round with updates."""
    seen = observe(view)
    events = [*(view.events(one.round) for one in seen), []]
    return [pairs(one, *noted, federation) for one, noted in zip(seen, pairwise(events), strict=True)]


def pairs(seen: Observation, events: Sequence[Event], later: Sequence[Event], federation: Federation) -> Pairs:
    """`later` is what the server noted in the next round: a late receipt stands there."""
    sites, count = tuple(sorted(seen.invited)), len(seen.rows)
    named = {event.row: event.name for event in events if isinstance(event, Row)}
    told = np.array([[float(named.get(row) == site) for site in sites] for row in range(count)])
    replies = np.column_stack([*_times(events, sites), *_times(later, sites)])
    compatible = candidates(seen, sites, federation)
    labels = np.array([float(label or 0) for label in seen.tiers])
    budgets = np.array([float(tier or 0) for tier in _tiers(sites, federation)])
    rows, columns = np.arange(count, dtype=float), np.arange(len(sites), dtype=float)
    # Where a row stands in its set, and a site in it by its name and by its reply.
    inside = np.array(
        [float(row - np.flatnonzero((compatible == compatible[row]).all(axis=1))[0]) for row in range(count)]
    )
    by_name = np.cumsum(compatible, axis=1) - 1.0
    by_reply = [_ranks(compatible, replies[:, column]) for column in (0, 2)]
    grids = [
        told,
        *_spread(rows, labels, inside, across=len(sites)),
        *(grid.T for grid in _spread(columns, budgets, *replies.T, across=count)),
        labels[:, None] - budgets,
        *(grid - inside[:, None] for grid in (by_name, *by_reply)),
        *by_reply,
    ]
    return Pairs(seen.round, sites, np.stack(grids, axis=-1), compatible, replies)


def candidates(seen: Observation, sites: Sequence[str], federation: Federation) -> NDArray[np.bool_]:
    """Which sites each row may be of: those of its mixing set, as the config makes it of all who were invited.

    If some did not answer, the sites with the row's label, or all if there are none.
    """
    tiers = _tiers(sites, federation)
    found = np.array([[label == tier for tier in tiers] for label in seen.tiers])
    if len(seen.rows) == len(sites):
        found = np.zeros((len(sites), len(sites)), bool)
        run_by = [federation.site(site).organisation or site for site in sites]
        done = 0
        for members in federation.route.together(tiers, run_by, federation.floor):
            found[done : done + len(members), list(members)] = True
            done += len(members)
    return found | ~found.any(axis=1, keepdims=True)


def _tiers(sites: Sequence[str], federation: Federation) -> list[str]:
    return [federation.site(site).tier if federation.unit else "" for site in sites]


def _times(events: Sequence[Event], sites: Sequence[str]) -> tuple[Grid, Grid]:
    """When each site's receipt came after the first, and as which."""
    times = {event.name: event.time for event in events if isinstance(event, Receipt)}
    order, begun = sorted(times, key=times.__getitem__), min(times.values(), default=0.0)
    when = np.array([times[site] - begun if site in times else NEVER for site in sites])
    return when, np.array([order.index(site) if site in times else NEVER for site in sites], float)


def _ranks(compatible: NDArray[np.bool_], when: Grid) -> Grid:
    """As which of its set a site replied, for every row; sites without a reply are last."""
    ranks = np.empty(compatible.shape)
    for row, members in enumerate(compatible):
        times = np.where(members & (when != NEVER), when, np.inf)
        ranks[row] = np.argsort(np.argsort(times, kind="stable"), kind="stable")
    return ranks


def _spread(*values: Grid, across: int) -> list[Grid]:
    """Each value once for every one of the other axis."""
    return [np.repeat(value[:, None], across, axis=1) for value in values]
