"""A federation's task in memory: its data, its model, and the flat vector of its parameters."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_privacy import vector
from fl_privacy.config import Federation, FedProx
from fl_privacy.tasks import models
from fl_privacy.tasks.catalog import CATALOG
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.datasets import load
from fl_privacy.tasks.partition import partition
from fl_privacy.tasks.train import Metrics, Recipe, evaluate, fit

if TYPE_CHECKING:
    from fl_privacy.dp.sampled import Private

# Files are read once for all sites of a process (hundreds in simulation).
_split = lru_cache(maxsize=2)(load)


class Workload:
    """One model in memory, which the sites of a process use in turn."""

    def __init__(self, federation: Federation, data_dir: Path | None = None) -> None:
        # One thread: sums are the same on every engine, and several sites share the machine's cores.
        torch.set_num_threads(1)
        self.federation, self._checked = federation, False
        task = federation.task
        self.split: Split = _split(task.dataset, data_dir)
        if task.partition.kind == "by-site":
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
        private: Private | None = None,
    ) -> NDArray[np.float32]:
        """Train from `start` on a site's records, with DP-SGD if `private` is given, and return the difference."""
        vector.load(self.model, start, self.layout)
        if private is None:
            fit(self.model, data, self.recipe, training_seed(self.federation.seed, site, round), device)
        else:
            from fl_privacy.dp import dpsgd  # imports scipy, which other parties never need

            dpsgd.fit(self.model, data, self.recipe, private, device)
        trained, _ = vector.flatten(self.model)
        return np.subtract(trained, start, out=trained)

    def check_records(self) -> None:
        """Raise if the model has no per-record gradients; checked once for all sites of a process."""
        from fl_privacy.dp import per_record

        if not self._checked:
            per_record.check(self.model, self.split.shape, self.split.classes)
            self._checked = True

    def evaluate(self, model: NDArray[np.float32]) -> Metrics:
        """Accuracy (or RMSE) and loss on the held-out records."""
        vector.load(self.model, model, self.layout)
        return evaluate(self.model, self.split.test)


def model_of(federation: Federation) -> nn.Module:
    """The federation's model; needs no data."""
    entry, task = CATALOG[federation.task.dataset], federation.task
    return models.build(task.model, entry.shape, entry.classes, federation.seed, task.hidden)


def layout_of(federation: Federation) -> vector.Layout:
    """The layout of the federation's model."""
    return vector.flatten(model_of(federation))[1]


def recipe_of(federation: Federation) -> Recipe:
    """How every site trains."""
    mu = federation.combine.mu if isinstance(federation.combine, FedProx) else 0.0
    return Recipe(**federation.task.train.model_dump(), proximal=mu)


def training_seed(seed: int, site: str, round: int) -> int:
    """The seed for a site's batch order in a round: different per site, and the same on every engine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{site}/{round}".encode()).digest()[:7], "big")
