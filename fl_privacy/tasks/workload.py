"""A federation's task in memory: its data, its model, and the flat vector of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_privacy import vector
from fl_privacy.tasks import models
from fl_privacy.tasks.catalog import OWN, TASKS
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.partition import partition
from fl_privacy.tasks.train import Metrics, Recipe, evaluate, fit

if TYPE_CHECKING:
    from fl_privacy.config import Federation

Fit = Callable[..., Any]  # (model, data, recipe, device=...): trains the model in place
Check = Callable[[nn.Module, tuple[int, ...], int], None]  # (model, shape of a record, classes)


@lru_cache(maxsize=2)
def _split(dataset: str, data_dir: Path | None) -> Split:
    """Files are read once for all sites of a process (hundreds in simulation)."""
    return TASKS.get(dataset).load(data_dir)


class Workload:
    """One model in memory, which the sites of a process use in turn."""

    def __init__(self, federation: Federation, data_dir: Path | None = None) -> None:
        # One thread: sums are the same on every engine, and several sites share the machine's cores.
        torch.set_num_threads(1)
        self.federation, self._checked = federation, set[Check]()
        task = federation.task
        self.split: Split = _split(task.dataset, data_dir)
        if task.partition.by_site:
            self.split = self.split.first_sites(len(federation.sites))
        self.model = model_of(federation)
        self.initial, self.layout = vector.flatten(self.model)
        self.recipe = recipe_of(federation)

    def site_data(self, site: str) -> Dataset:
        """The training records of one site."""
        chosen, train = self.federation.task.partition, self.split.train
        parts = partition(
            train.y, len(self.federation.sites), chosen.kind, self.federation.seed, chosen.alpha, train.site
        )
        return train.take(parts[self.federation.site_names.index(site)])

    def update(
        self,
        start: NDArray[np.float32],
        data: Dataset,
        site: str,
        round: int,
        device: str = "cpu",
        private: Fit | None = None,
    ) -> NDArray[np.float32]:
        """Train from `start` on a site's records, with `private` if given, and return the difference."""
        vector.load(self.model, start, self.layout)
        seed = training_seed(self.federation.seed, site, round)
        (private or partial(fit, seed=seed))(self.model, data, self.recipe, device=device)
        trained, _ = vector.flatten(self.model)
        return np.subtract(trained, start, out=trained)

    def once(self, check: Check) -> None:
        """Check the model, once for all sites of a process."""
        if check not in self._checked:
            check(self.model, self.split.shape, self.split.classes)
            self._checked.add(check)

    def evaluate(self, model: NDArray[np.float32]) -> Metrics:
        """Accuracy (or RMSE) and loss on the held-out records."""
        vector.load(self.model, model, self.layout)
        return evaluate(self.model, self.split.test)


def model_of(federation: Federation) -> nn.Module:
    """The federation's model; needs no data."""
    task = federation.task
    entry = TASKS.get(task.dataset)
    if task.model == OWN:
        return models.seeded(entry.own_model, federation.seed)
    return models.build(task.model, entry.shape, entry.classes, federation.seed, task.hidden)


def layout_of(federation: Federation) -> vector.Layout:
    """The layout of the federation's model."""
    return vector.flatten(model_of(federation))[1]


def recipe_of(federation: Federation) -> Recipe:
    """How every site trains."""
    return Recipe(**federation.task.train.model_dump(), proximal=federation.combine.proximal)


def training_seed(seed: int, site: str, round: int) -> int:
    """The seed for a site's batch order in a round: different per site, and the same on every engine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{site}/{round}".encode()).digest()[:7], "big")
