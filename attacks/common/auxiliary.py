"""An attacker's own data: records of the same kind that no site has, and the public protocol run on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.dp import ldp
from fl_privacy.tasks.attacker import Auxiliary, facts_of
from fl_privacy.tasks.canaries import chosen
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import Workload, model_of, recipe_of


def gather(federation: Federation, data_dir: Path | None) -> Auxiliary:
    """What the attacker has for this federation's task."""
    return facts_of(federation).auxiliary(federation, data_dir, federation.seed)


def canaries(federation: Federation, data_dir: Path | None) -> dict[str, Dataset]:
    """The canaries of every site, without what the coins said."""
    asked, work = federation.canaries, Workload(federation, data_dir)
    if asked is None:
        raise Unsuitable("canaries: this run has none to guess at; record one with `canaries: {}` and `audit: true`")
    found = {}
    for name in federation.site_names:
        data = work.site_data(name)
        found[name] = data.take(chosen(len(data), asked.fraction, federation.seed, name))
    return found


def clip_of(federation: Federation) -> float | None:
    """The norm to which every site clips its update, as the config says."""
    return federation.privatise.norm


class Trainer:
    """The federation's public training protocol, run by the attacker on its own data."""

    def __init__(self, federation: Federation, auxiliary: Auxiliary) -> None:
        self._auxiliary, self._clip = auxiliary, clip_of(federation)
        self._model, self._recipe = model_of(federation), recipe_of(federation)
        self._layout = vector.flatten(self._model)[1]

    def updates(self, start: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
        """The update of every auxiliary site from this model: clipped as the protocol says, without noise."""
        made = np.empty((len(self._auxiliary.sites), start.size), np.float32)
        for index, data in enumerate(self._auxiliary.sites):
            vector.load(self._model, start, self._layout)
            fit(self._model, data, self._recipe, seed + index)
            made[index] = vector.flatten(self._model)[0] - start
        return made if self._clip is None else np.stack([ldp.clip(update, self._clip) for update in made])
