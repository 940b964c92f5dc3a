"""A toy attack, as another package would provide it: colluding aggregators join their shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Attack
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from fl_privacy.shard import masks
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript.events import Row
from fl_privacy.transcript.read import View

ENTRY_POINT = "[fl_privacy.attacks]\njoined-shards = colluding:ATTACK\n"
Joined = dict[tuple[int, str], NDArray[np.float32]]


@dataclass(frozen=True)
class Findings:
    """Updates by round and site, zero where none of the colluding parties saw a coordinate."""

    updates: Joined


class JoinedShards:
    """The masks are public and every aggregator knows whose row is whose, so there is nothing to guess."""

    name = "joined-shards"
    observers = ("aggregator-*",)
    needs: frozenset[Need] = frozenset()

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
        federation, joined = knowledge.federation, Joined()
        size = layout_of(federation).size
        owners = masks.owners(size, federation.route.aggregators, federation.seed)  # type: ignore[union-attr]
        for observer, view in views.items():
            owned = owners == int(observer.rpartition("-")[2])
            for round in view.rounds:
                rows = view.round(round).arrays["updates"]
                for event in view.events(round):
                    if isinstance(event, Row):
                        whole = joined.setdefault((round, event.name), np.zeros(size, np.float32))
                        whole[owned] = rows[event.row]
        return Findings(joined)

    def score(self, findings: Findings, truth: Truth) -> Scores:
        """The share of coordinates that equal the site's own; chance: those of another site in the same round."""
        own, other = [], []
        for (round, name), found in findings.updates.items():
            for site, clean in truth.clean(round).items():
                equal = float(((found == clean) & (clean != 0)).sum() / (clean != 0).sum())
                (own if site == name else other).append(equal)
        return Scores({"coordinates": Measure(float(np.mean(own)), float(np.mean(other)))})


ATTACK: Attack[Findings] = JoinedShards()
