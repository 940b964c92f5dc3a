"""Policy: who takes part in a round, and what becomes of their updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine import mean, optimiser
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError

COHORT_STREAM = 0x434F_484F


class Strategy:
    """Cohorts by seed; updates averaged with equal weights (record counts would tell sites apart) and then stepped."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.rule = optimiser.make(**federation.combine.model_dump(exclude={"mu"}))

    def cohort(self, message: int, present: Sequence[str]) -> list[str]:
        """The sites of the `message`-th Flower message, drawn by seed from those present."""
        size = min(self.federation.cohort, len(present))
        if size < self.federation.quorum:
            raise FederationError(
                f"quorum: {len(present)} sites are there and {self.federation.quorum} are needed; start the others"
            )
        rng = np.random.default_rng(np.random.SeedSequence([COHORT_STREAM, self.federation.seed, message]))
        names = sorted(present)
        return sorted(names[i] for i in rng.choice(len(names), size, replace=False))

    def combine(self, model: NDArray[np.float32], updates: NDArray[np.float32]) -> NDArray[np.float32]:
        """The next model."""
        return self.rule.step(model, mean.weighted(updates, exact=self.federation.reproducible))

    def state(self) -> dict[str, NDArray[Any]]:
        return self.rule.state()

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        self.rule.restore(state)
