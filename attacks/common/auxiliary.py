"""An attacker's own data: records of the same kind that no site has, and the public protocol run on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_privacy import vector
from fl_privacy.config import Federation, Ldp
from fl_privacy.dp import ldp
from fl_privacy.tasks.attacker import Auxiliary, facts_of
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import model_of, recipe_of


def gather(federation: Federation, data_dir: Path | None) -> Auxiliary:
    """What the attacker has for this federation's task."""
    return facts_of(federation).auxiliary(federation, data_dir, federation.seed)


def clip_of(federation: Federation) -> float | None:
    """The norm to which every site clips its update, as the config says."""
    return federation.privatise.clip if isinstance(federation.privatise, Ldp) else None


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
