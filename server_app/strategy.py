"""Policy: which sites take part in a round, and how their updates are combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import Payload
from fl_privacy.combine.rules import Combiner, Grouped, Grouping
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.tasks.forward import Forward
from fl_privacy.vector import Vector

COHORT_STREAM = 0x434F_484F
MODEL = "model"

Models = dict[str, Vector]  # by name: usually one, several where sites are clustered, none with shards


class Strategy:
    """Cohorts by seed; every model combined by the federation's rule (weights by record count would identify sites)."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self._combiners: dict[str, Combiner] = {}
        self._grouping: Grouping | None = None
        if federation.combine.several:
            self._grouping = federation.combine.grouping(federation, Forward(federation))

    @property
    def holders(self) -> Mapping[str, str]:
        """By site the name of the model that it starts from, where sites have several."""
        return {} if self._grouping is None else self._grouping.holders

    @property
    def made(self) -> Mapping[str, int]:
        """By name the round that made each of several models."""
        return {} if self._grouping is None else self._grouping.made

    def group(self, models: Models, rows: Payload, tiers: Sequence[str], owners: Sequence[str]) -> Grouped | None:
        """The next models and what was decided, where sites have several."""
        return None if self._grouping is None else self._grouping.step(models, rows, tiers, owners)

    def cohort(self, round: int, present: Sequence[str]) -> list[str]:
        """The sites of a round, drawn by seed from those present."""
        size = min(self.federation.cohort, len(present))
        if size < self.federation.quorum:
            needed = f"{len(present)} sites are present and {self.federation.quorum} are needed"
            raise FederationError(f"quorum: {needed}; start the others")
        rng = np.random.default_rng(np.random.SeedSequence([COHORT_STREAM, self.federation.seed, round - 1]))
        names = sorted(present)
        return sorted(names[i] for i in rng.choice(len(names), size, replace=False))

    def combine(self, models: Models, rows: Payload, tiers: Sequence[str], owners: Sequence[str] = ()) -> Models:
        """The next models; each has an optimiser of its own."""
        return {
            name: self._combiner(name).step(
                model, self.federation.coding.decode(rows, model.size), tiers, owners=owners
            )
            for name, model in models.items()
        }

    def apply(self, models: Models, mean: Vector) -> Models:
        """The next models, where only the mean of the updates is known."""
        return {name: self._combiner(name).step(model, mean[None]) for name, model in models.items()}

    def _combiner(self, name: str) -> Combiner:
        return self._combiners.setdefault(name, Combiner(self.federation))

    def state(self) -> dict[str, NDArray[Any]]:
        """What a checkpoint needs to continue: the optimisers' arrays, those of other models under their names."""
        found = {} if self._grouping is None else self._grouping.state()
        for name, combiner in self._combiners.items():
            found |= {_prefix(name) + key: array for key, array in combiner.state().items()}
        return found

    def restore(self, models: Models, state: Mapping[str, NDArray[Any]]) -> None:
        if self._grouping is not None:
            self._grouping.restore(state)
            return
        for name in models:
            own = {key.removeprefix(_prefix(name)): array for key, array in state.items() if _owner(key) == name}
            self._combiner(name).restore(own)


def _prefix(name: str) -> str:
    return "" if name == MODEL else f"{name}/"


def _owner(key: str) -> str:
    return key.rpartition("/")[0] or MODEL
