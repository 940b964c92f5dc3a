"""Which global cluster each site belongs to, over all rounds (Tazza, Algorithm 1)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

STATE = "clusters"


@dataclass
class History:
    """Sites without a cluster are not in `clusters`: they never took part, or never were near enough to others."""

    clusters: dict[str, int] = field(default_factory=dict)
    fresh: int = 1  # the number of the next new cluster

    def assign(self, groups: Sequence[Sequence[str]], published: bool = False) -> list[int]:
        """Give every site of a round's groups its global cluster; returns each group's.

        Sites that are in no group keep what they have: on a merge, only those move that are in the group.

        As published, a group takes the label that its sites have, so two groups with the same label stay one cluster,
        and whoever is in a cluster once cannot be separated again; sites of different labels found in one group get a
        new, merged cluster. Here a label stays with the group that has most of its sites, another group gets a new one,
        and a merge moves sites to the cluster of most of them.
        """
        made = self._published(groups) if published else self._ours(groups)
        for group, label in zip(groups, made, strict=True):
            self.clusters.update(dict.fromkeys(group, label))
        return made

    def _published(self, groups: Sequence[Sequence[str]]) -> list[int]:
        made = []
        for group in groups:
            labels = self._labels(group)
            made.append(next(iter(labels)) if len(labels) == 1 else self._new())  # none yet, or a merge
        return made

    def _ours(self, groups: Sequence[Sequence[str]]) -> list[int]:
        claims = [self._labels(group) for group in groups]
        order = sorted(range(len(groups)), key=lambda i: (-max(claims[i].values(), default=0), -len(groups[i]), i))
        made: dict[int, int] = {}
        for index in order:
            wanted = next((label for label, _ in ranked(claims[index])), None)
            made[index] = self._new() if wanted is None or wanted in made.values() else wanted
        return [made[index] for index in range(len(groups))]

    def _labels(self, group: Sequence[str]) -> Counter[int]:
        return Counter(self.clusters[site] for site in group if site in self.clusters)

    def _new(self) -> int:
        self.fresh += 1
        return self.fresh - 1

    @property
    def largest(self) -> int | None:
        """The cluster with the most sites; of equally large ones the oldest."""
        return next((label for label, _ in ranked(Counter(self.clusters.values()))), None)

    def state(self) -> dict[str, NDArray[Any]]:
        text = json.dumps({"clusters": self.clusters, "fresh": self.fresh}, sort_keys=True)
        return {STATE: np.frombuffer(text.encode(), np.uint8).copy()}

    @classmethod
    def of(cls, state: Mapping[str, NDArray[Any]]) -> History:
        if STATE not in state:
            return cls()
        found = json.loads(np.asarray(state[STATE], np.uint8).tobytes())
        return cls({str(site): int(label) for site, label in found["clusters"].items()}, int(found["fresh"]))


def ranked(counts: Counter[int]) -> list[tuple[int, int]]:
    """By count, of equal counts the smallest label first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
