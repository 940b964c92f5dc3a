"""The task of a config that names a data set and a model of ours."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_privacy.errors import FederationError
from fl_privacy.tasks import models
from fl_privacy.tasks.data import Dataset, Parts, Split, pool
from fl_privacy.tasks.dataset import DataSet
from fl_privacy.tasks.partition import Coupling, deal_iid, partition
from fl_privacy.tasks.task import Task
from fl_privacy.topology.leverage import degrees

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fl_privacy.config import Federation

HELD_OUT = 0x484F_4C44  # separates the stream that deals out held-out records from others of the same seed


@lru_cache(maxsize=2)
def load(data: DataSet, folder: Path | None) -> Split:
    """A benchmark's files are read once for all sites of a process (hundreds in simulation)."""
    return data.load(folder)


class Standard(Task):
    """A data set and a model by name."""

    def __init__(self, federation: Federation) -> None:
        super().__init__()
        self._federation, self.dataset = federation, federation.task.data_set
        self.preprocessing = self.dataset.preprocessing  # type: ignore[misc]

    def model(self) -> nn.Module:
        chosen, data = self._federation.task, self.dataset
        return models.build(chosen.model, data.shape, data.classes, self._federation.seed, chosen.hidden)

    def data(self, site: str, folder: Path | None) -> Parts:
        """A site's own records from its own folder; or its share of a benchmark, for experiments."""
        number = self._federation.site_names.index(site)
        if self._federation.task.by_site:
            return self.dataset.of_site(self._federation.task.centre(site, number), folder)
        split = load(self.dataset, folder)
        held_out = np.sort(self._dealt(len(split.test))[number])
        return Parts(split.train.take(self._partition(split)[number]), split.test.take(held_out))

    def held_out(self, folder: Path | None) -> Dataset:
        """All held-out records, where whoever evaluates has the data of all sites."""
        if self._federation.task.by_site:
            return pool([self.data(site, folder).held_out for site in self._federation.site_names])
        return load(self.dataset, folder).test

    def _partition(self, split: Split) -> list[np.ndarray]:
        chosen, train, sites = self._federation.task.partition, split.train, len(self._federation.sites)
        seed = self._federation.seed
        coupling = coupling_of(self._federation) if chosen.dealing == "coupled" else None
        return partition(train.y, sites, chosen.dealing, seed, chosen.alpha, train.site, chosen.records, coupling)

    def _dealt(self, count: int) -> list[np.ndarray]:
        rng = np.random.default_rng(np.random.SeedSequence([HELD_OUT, self._federation.seed]))
        return deal_iid(count, len(self._federation.sites), rng)


def coupling_of(federation: Federation) -> Coupling:
    """How far the position of each site decides its classes."""
    chosen = federation.task.partition
    names = [site.organisation or site.name for site in federation.sites]
    phi = [list(dict.fromkeys(names)).index(name) for name in names]
    if chosen.position == "degree":
        if federation.topology is None:
            raise FederationError("task.partition.position: degree needs a graph; add topology: {kind: star}, say")
        found = degrees(federation.topology.graph(federation), len(names))
        phi = np.unique(found, return_inverse=True)[1].tolist()  # the worst connected first
    return Coupling(chosen.eta, phi, chosen.sizes)


class Weighted(Standard):
    """The same, with a weight per class in the loss; here and not above, because ours is faster without."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        weights = outputs.new_tensor(self.dataset.class_weights)
        return cross_entropy(outputs, targets, weights, reduction="none")
