"""Policy: who takes part in a round, and what becomes of their updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine import mean, optimiser, weights
from fl_privacy.config import Federation, NoPrivatise
from fl_privacy.errors import FederationError

COHORT_STREAM = 0x434F_484F


class Strategy:
    """Cohorts by seed; updates averaged equally or by privacy label (record counts would tell sites apart)."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.rule = optimiser.make(**federation.combine.model_dump(exclude={"mu", "weights"}))

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

    def combine(
        self, model: NDArray[np.float32], updates: NDArray[np.float32], tiers: Sequence[str]
    ) -> NDArray[np.float32]:
        """The next model."""
        return self.rule.step(model, mean.weighted(updates, self._weights(tiers), self.federation.reproducible))

    def _weights(self, tiers: Sequence[str]) -> weights.Weights | None:
        if isinstance(self.federation.privatise, NoPrivatise):
            return None
        rule = weights.RULES[self.federation.combine.weights]
        return rule([float(tier) for tier in tiers], self.federation.privatise.delta)

    def state(self) -> dict[str, NDArray[Any]]:
        return self.rule.state()

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        self.rule.restore(state)
