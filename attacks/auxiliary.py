"""An attacker's own data: records of the same kind that no site of the federation has, as sites of its own making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.tasks import lcl
from fl_privacy.tasks.catalog import TASKS
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import model_of, recipe_of

SITES = 96  # of its own making, where the data do not come by site
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Auxiliary:
    """Data by site, and each site's attribute: the behaviour of a household, or the class that most records have."""

    sites: tuple[Dataset, ...]
    labels: Labels


def gather(federation: Federation, data_dir: Path | None, seed: int) -> Auxiliary:
    """What the attacker has for this federation's task."""
    if federation.task.dataset == "lcl":
        found = lcl.auxiliary(data_dir)
        parts = [
            found.split.train.take(np.flatnonzero(found.split.train.site == s)) for s in range(len(found.behaviour))
        ]
        if federation.task.partition.kind != "by-site":
            return _remixed(parts, found.behaviour, seed)
        return Auxiliary(tuple(parts), found.behaviour)
    split = TASKS.get(federation.task.dataset).load(data_dir)
    if federation.task.partition.kind == "by-site" or not split.classes:
        raise FederationError(
            f"dataset: nobody has auxiliary data for {federation.task.dataset!r} by site; use the iid or dirichlet "
            "partition, or the lcl data set"
        )
    # Held-out records: no site trains on them.
    size = min(len(split.train) // len(federation.sites), len(split.test))
    alpha = federation.task.partition.alpha if federation.task.partition.kind == "dirichlet" else None
    return _drawn(split.test, split.classes, size, alpha, seed)


def _drawn(records: Dataset, classes: int, size: int, alpha: float | None, seed: int) -> Auxiliary:
    """Sites with class shares from Dirichlet(alpha), or equal ones, of records drawn with replacement."""
    rng = np.random.default_rng(seed)
    by_class = [np.flatnonzero(records.y == label) for label in range(classes)]
    sites, labels = [], []
    for _ in range(SITES):
        shares = rng.dirichlet([alpha] * classes) if alpha is not None else np.full(classes, 1 / classes)
        counts = rng.multinomial(size, shares)
        rows = np.concatenate(
            [rng.choice(found, count) for found, count in zip(by_class, counts, strict=True) if count]
        )
        sites.append(records.take(rng.permutation(rows)))
        labels.append(int(counts.argmax()))
    return Auxiliary(tuple(sites), np.array(labels))


def _remixed(parts: Sequence[Dataset], behaviour: Labels, seed: int) -> Auxiliary:
    """The same records dealt out at random: a site's attribute is whether it has more day-active ones than most."""
    rng = np.random.default_rng(seed)
    x, y = np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts])
    owner = np.repeat(behaviour, [len(p) for p in parts])
    dealt = np.array_split(rng.permutation(len(y)), len(parts))
    return Auxiliary(tuple(Dataset(x[rows], y[rows]) for rows in dealt), above_median([owner[r].mean() for r in dealt]))


def above_median(shares: Sequence[float]) -> Labels:
    """1 for the upper half."""
    return (np.asarray(shares) > np.median(shares)).astype(np.int64)


class Trainer:
    """The federation's public training protocol, run by the attacker on its own data."""

    def __init__(self, federation: Federation, auxiliary: Auxiliary) -> None:
        self._auxiliary = auxiliary
        self._model, self._recipe = model_of(federation), recipe_of(federation)
        self._layout = vector.flatten(self._model)[1]

    def updates(self, start: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
        """The clean update of every auxiliary site from this model."""
        made = np.empty((len(self._auxiliary.sites), start.size), np.float32)
        for index, data in enumerate(self._auxiliary.sites):
            vector.load(self._model, start, self._layout)
            fit(self._model, data, self._recipe, seed + index)
            made[index] = vector.flatten(self._model)[0] - start
        return made
