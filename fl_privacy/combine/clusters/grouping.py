"""The server's part of a round with clusters: validate, assign, combine each cluster by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import Payload
from fl_privacy.combine.clusters.dbscan import OUTLIER
from fl_privacy.combine.clusters.history import History, ranked
from fl_privacy.combine.clusters.samples import WithSamples
from fl_privacy.combine.clusters.validation import Found, validate
from fl_privacy.combine.rules import Combiner, Forward, Grouped, Matrix, Placed
from fl_privacy.errors import FederationError
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.combine.clusters.rule import Clusters
    from fl_privacy.config import Federation

MODEL = "model"  # what a site without a cluster starts from: that of the largest cluster
CLUSTER = "cluster-"
MADE = "made"  # in the state of a checkpoint


def named(label: int) -> str:
    """The name of a cluster's model."""
    return f"{CLUSTER}{label}"


class Clustering:
    """All clusters of a run: their sites, and what their rules and optimisers keep."""

    def __init__(self, rule: Clusters, federation: Federation, forward: Forward) -> None:
        self._rule, self._federation, self._forward = rule, federation, forward
        self._history = History()
        self._combiners: dict[str, Combiner] = {}
        self._made, self._round = {MODEL: 0}, 0

    @property
    def made(self) -> Mapping[str, int]:
        """By name the round that made each model; 0: the first one."""
        return self._made

    @property
    def holders(self) -> Mapping[str, str]:
        """The name of the model that every site starts from and may see."""
        clusters = self._history.clusters
        return {site: named(clusters[site]) if site in clusters else MODEL for site in self._federation.site_names}

    def step(self, models: Mapping[str, Vector], rows: Payload, tiers: Sequence[str], owners: Sequence[str]) -> Grouped:
        """The next model of every cluster. Without any cluster in a round, all models stay as they are."""
        coding = self._federation.coding
        assert isinstance(coding, WithSamples)
        updates = coding.decode(rows, models[MODEL].size)
        holders, before = self.holders, dict(self._history.clusters)
        with np.errstate(over="ignore", invalid="ignore"):  # such a model is as far from all others as can be
            trained = np.stack(
                [models[holders[site]] + update for site, update in zip(owners, updates, strict=True)], dtype=np.float32
            )
        found = self._validated(trained, coding.samples(rows))
        groups = [
            [row for row, label in enumerate(found.labels) if label == group] for group in range(max(found.labels) + 1)
        ]
        labels = self._history.assign([[owners[row] for row in group] for group in groups], self._rule.published)
        members: dict[int, list[int]] = {}
        for label, group in zip(labels, groups, strict=True):
            members.setdefault(label, []).extend(group)
        reasons = self._outliers(found, owners)
        made, earlier, self._round = dict(models), {**self._made}, self._round + 1
        for label, chosen in sorted(members.items()):
            of = sorted(chosen)
            start = self._start(label, [owners[row] for row in of], before, models)
            tiers_of = [tiers[row] for row in of]
            made[named(label)], reason = self._combined(named(label), models[start], trained[of], tiers_of)
            self._made[named(label)] = earlier[start] if reason else self._round
            reasons += [reason] if reason else []
        placed = [
            Placed(site, group, before.get(site), self._history.clusters.get(site), _nearest(found, row))
            for row, (site, group) in enumerate(zip(owners, found.labels, strict=True))
        ]
        noted = {"clusters": float(len(set(self._history.clusters.values()))), "eps": float(found.eps)}
        noted["outliers"] = float(found.labels.count(OUTLIER))
        arrays = {"distances": found.distances.astype(np.float32)}
        return Grouped(self._kept(made, reasons), arrays, placed, reasons, noted)

    def _validated(self, trained: Matrix, given: NDArray[np.float32]) -> Found:
        """Every model on all samples."""
        rule, senders = self._rule, len(given)
        x = np.ascontiguousarray(given.reshape(senders * rule.samples, *rule.shape(self._federation)))
        answers = [self._forward(model, x).reshape(senders, rule.samples, -1) for model in trained]
        for answer, model in zip(answers, trained, strict=True):
            if not np.isfinite(model).all():  # its answers may be, as behind a ReLU, but no rule could combine it
                answer[:] = np.nan
        return validate(np.stack(answers), rule.points, rule.factor, rule.eps, rule.published)

    def _start(self, label: int, sites: Sequence[str], before: Mapping[str, int], models: Mapping[str, Vector]) -> str:
        """The model that a cluster continues from: its own, or of a new one that of most of its sites."""
        if named(label) in models:
            return named(label)
        came = Counter(before[site] for site in sites if site in before)
        return next((named(one) for one, _ in ranked(came)), MODEL)

    def _combined(self, name: str, base: Vector, trained: Matrix, tiers: Sequence[str]) -> tuple[Vector, str]:
        """A cluster's next model; the old one and the reason where its rule cannot combine these."""
        combiner = self._combiners.setdefault(name, Combiner(self._federation, self._rule.rule))
        try:
            return combiner.step(base, trained - base, tiers), ""
        except FederationError as error:
            return base, f"{name}: its {len(trained)} updates are not combined: {error}"

    def _outliers(self, found: Found, owners: Sequence[str]) -> list[str]:
        apart = [site for site, label in zip(owners, found.labels, strict=True) if label == OUTLIER]
        if not apart:
            return []
        near = f"fewer than {self._rule.points} models are within {found.eps:.3g} of each other"
        if len(apart) == len(owners):
            return [f"all {len(owners)} models are outliers: {near}; every model stays as it is"]
        return [f"outliers, not combined: {', '.join(apart)}"]

    def _kept(self, models: dict[str, Vector], reasons: list[str]) -> dict[str, Vector]:
        """The models of clusters that have sites, and under MODEL that of the largest one."""
        there = {named(label) for label in self._history.clusters.values()}
        for name in sorted(models.keys() - there - {MODEL}):
            del models[name], self._made[name]
            self._combiners.pop(name, None)
            reasons.append(f"{name}: all its sites are in other clusters, and its model is no longer used")
        largest = self._history.largest
        if largest is None:
            return models
        self._made[MODEL] = self._made[named(largest)]
        return {**models, MODEL: models[named(largest)]}

    def state(self) -> dict[str, NDArray[Any]]:
        found = self._history.state()
        text = json.dumps([self._round, self._made], sort_keys=True)
        found[MADE] = np.frombuffer(text.encode(), np.uint8).copy()
        for name, combiner in self._combiners.items():
            found |= {f"{name}/{key}": array for key, array in combiner.state().items()}
        return found

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._history, self._combiners = History.of(state), {}
        if MADE in state:
            self._round, self._made = json.loads(np.asarray(state[MADE], np.uint8).tobytes())
        for label in sorted(set(self._history.clusters.values())):
            prefix = f"{named(label)}/"
            own = {key.removeprefix(prefix): array for key, array in state.items() if key.startswith(prefix)}
            self._combiners[named(label)] = combiner = Combiner(self._federation, self._rule.rule)
            combiner.restore(own)


def _nearest(found: Found, row: int) -> float:
    """How far the most similar other model of the round is."""
    others = np.delete(found.distances[row], row)
    return float(others.min()) if others.size else 0.0
