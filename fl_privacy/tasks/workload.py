"""A federation's task in memory: its data, its model, and the flat vector of its parameters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_privacy import vector
from fl_privacy.scores.form import Form, Tally
from fl_privacy.scores.tally import tally
from fl_privacy.tasks import models
from fl_privacy.tasks.catalog import OWN, TASKS
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.partition import partition
from fl_privacy.tasks.train import Metrics, Recipe, evaluate, fit, outputs_of

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
        self.seconds = 0.0  # that the last update took, whichever site's
        self._data_dir = data_dir
        self.model = model_of(federation)
        self.initial, self.layout = vector.flatten(self.model)
        self.recipe = recipe_of(federation)

    @cached_property
    def split(self) -> Split:
        """All data, loaded when they are first needed: a party that only has the model needs none."""
        task = self.federation.task
        split = _split(task.dataset, self._data_dir)
        return split.first_sites(len(self.federation.sites)) if task.partition.by_site else split

    def loaded(self) -> Workload:
        """The same, with its data in memory."""
        _ = self.split
        return self

    def site_data(self, site: str) -> Dataset:
        """The training records of one site."""
        chosen, train = self.federation.task.partition, self.split.train
        parts = partition(
            train.y, len(self.federation.sites), chosen.kind, self.federation.seed, chosen.alpha, train.site
        )
        return train.take(parts[self.federation.site_names.index(site)])

    def held_out(self, site: str) -> Dataset:
        """The held-out records of one site: its own, or its share of a pooled data set."""
        federation, test, index = self.federation, self.split.test, self.federation.site_names.index(site)
        if federation.task.partition.by_site and test.site is not None:
            return test.take(np.flatnonzero(test.site == index))
        return test.take(partition(test.y, len(federation.sites), "iid", federation.seed)[index])

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
        began = time.monotonic()
        vector.load(self.model, start, self.layout)
        seed = training_seed(self.federation.seed, site, round)
        (private or partial(fit, seed=seed))(self.model, data, self.recipe, device=device)
        trained, _ = vector.flatten(self.model)
        self.seconds = time.monotonic() - began
        return np.subtract(trained, start, out=trained)

    def tally(self, model: NDArray[np.float32], data: Dataset, forms: Sequence[Form], device: str) -> list[Tally]:
        """The counts of a model on these records, in each of the forms."""
        vector.load(self.model, model, self.layout)
        outputs, losses = outputs_of(self.model, data, device)
        return [tally(form, outputs, data.y, losses) for form in forms]

    def alone(self, data: Dataset, site: str, epochs: int, device: str) -> NDArray[np.float32]:
        """A model trained on a site's records only, from the initial one and with the federation's recipe."""
        vector.load(self.model, self.initial, self.layout)
        recipe = replace(self.recipe, epochs=epochs, proximal=0.0)
        fit(self.model, data, recipe, training_seed(self.federation.seed, site, 0), device)
        return vector.flatten(self.model)[0]

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
