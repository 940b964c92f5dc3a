"""From the server's view: which sites it combined with which, and the models that came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_privacy.transcript.events import Clustered, Farewell, Row
from fl_privacy.transcript.read import View

Vector = NDArray[np.float32]
OUTLIER = -1
MODEL = "model"


@dataclass(frozen=True)
class Seen:
    """One round: by site its group (-1: not combined with anybody) and its cluster over all rounds, if it has one."""

    round: int
    groups: Mapping[str, int]
    clusters: Mapping[str, int | None]


@dataclass(frozen=True)
class Findings:
    rounds: list[Seen]
    models: Mapping[str, Vector]  # after the last round, by name

    def holder(self, site: str) -> str:
        """The name of the model that a site has in the end."""
        last = next((one.clusters[site] for one in reversed(self.rounds) if site in one.clusters), None)
        name = f"cluster-{last}"
        return name if name in self.models else MODEL


def gather(view: View, models: Mapping[str, Vector]) -> Findings:
    """All rounds with updates. Without clusters, all sites are combined with each other."""
    rounds = []
    for number in view.rounds:
        events = view.events(number)
        if any(isinstance(event, Farewell) for event in events):
            continue
        placed = [event for event in events if isinstance(event, Clustered)]
        groups = {event.site: event.group for event in placed}
        groups = groups or {event.name: 0 for event in events if isinstance(event, Row)}
        rounds.append(Seen(number, groups, {event.site: event.after for event in placed}))
    return Findings(rounds, models)
