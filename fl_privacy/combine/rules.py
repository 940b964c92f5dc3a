"""How a round's updates are combined: a rule turns them into one, and an optimiser applies it to the model.

The server and every shard aggregator combine by the same `Combiner`, which owns the optimiser's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.choices import Choice
from fl_privacy.combine import mean, optimiser, robust, weights
from fl_privacy.combine.mean import Shares
from fl_privacy.errors import FederationError
from fl_privacy.registry import Registry
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fl_privacy.config import Federation

Matrix = NDArray[np.float32]


class Rule(Choice):
    """A way to combine. Subclasses override `aggregate`, `optimiser` or both."""

    needs_rows: ClassVar[bool] = False  # if not, the sum of the updates is enough
    coordinatewise: ClassVar[bool] = True  # so a shard can be combined by itself
    weighable: ClassVar[bool] = True

    weights: Literal["equal", "epsilon", "precision", "records"] = Field(
        "equal", description="by epsilon or inverse noise variance with `privatise`, or by number of records without"
    )
    lr: float = Field(1.0, gt=0)

    @property
    def proximal(self) -> float:
        """FedProx's mu, for the proximal term that sites add to their loss."""
        return 0.0

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        """One update out of many; with `exact`, bits that do not depend on the order of the rows."""
        return mean.weighted(rows, shares, exact)

    def optimiser(self) -> optimiser.Optimiser:
        return optimiser.FedAvg(self.lr)

    def problems(self, federation: Federation) -> Iterator[str]:
        if self.weights == "equal":
            return
        given = f"combine.weights: {self.weights!r}"
        if not self.weighable:
            yield f"{given} is not supported by {self.kind}; use equal"
        elif self.weights == "records":
            if not federation.route.remembers:
                yield f"{given} needs aggregators, and route is {federation.route.kind}; use shards or equal"
            if federation.unit is not None:
                yield f"{given} tells how many records a site has, which no budget covers; use epsilon"
        elif federation.unit is None:
            yield f"{given} needs budgets, and privatise.kind is none; use equal"
        elif self.weights == "precision" and not federation.privatise.after_training:
            kind = federation.privatise.kind
            yield f"{given} needs noise on the update, and {kind} adds it in training; use epsilon"


class FedAvg(Rule):
    """model + lr * mean update."""

    kind: Literal["fedavg"] = "fedavg"


class FedProx(Rule):
    """FedAvg; sites add mu/2 |w - w_global|^2 to their loss."""

    kind: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.1, gt=0)

    @property
    def proximal(self) -> float:
        return self.mu


class Adaptive(Rule):
    """What FedAdam and FedYogi share."""

    moments: ClassVar[Any]  # the optimiser

    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)

    def optimiser(self) -> optimiser.Optimiser:
        made: optimiser.Optimiser = self.moments(self.lr, self.beta1, self.beta2, self.tau)
        return made


class FedAdam(Adaptive):
    """Adam on the mean update (Reddi et al. 2021, Algorithm 2)."""

    moments: ClassVar[Any] = optimiser.FedAdam

    kind: Literal["fedadam"] = "fedadam"
    lr: float = Field(0.1, gt=0)


class FedYogi(Adaptive):
    """Yogi on the mean update (Reddi et al. 2021, Algorithm 2)."""

    moments: ClassVar[Any] = optimiser.FedYogi

    kind: Literal["fedyogi"] = "fedyogi"
    lr: float = Field(0.01, gt=0)


class Robust(Rule):
    """Median and trimmed mean need every update, unweighted."""

    needs_rows: ClassVar[bool] = True
    weighable: ClassVar[bool] = False


class Median(Robust):
    """model + lr * the median of every coordinate (Yin et al. 2018, Option I)."""

    kind: Literal["median"] = "median"

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.median(rows)


class TrimmedMean(Robust):
    """model + lr * the mean of every coordinate without its extreme values (Yin et al. 2018, Option II)."""

    kind: Literal["trimmed-mean"] = "trimmed-mean"
    trim: float = Field(0.1, ge=0, lt=0.5, description="fraction of the values dropped at each end")

    def aggregate(self, rows: Matrix, shares: Shares, exact: bool) -> Vector:
        return robust.trimmed_mean(rows, self.trim)


OURS = (FedAvg, FedProx, FedAdam, FedYogi, Median, TrimmedMean)
NAMES = {rule.model_fields["kind"].default: f"{__name__}:{rule.__name__}" for rule in OURS}
RULES: Registry[type[Rule]] = Registry("fl_privacy.rules", NAMES, Rule)


class Combiner:
    """A federation's rule and the optimiser's state, for the party that holds the model or a shard of it."""

    def __init__(self, federation: Federation) -> None:
        self._rule, self._exact = federation.combine, federation.reproducible
        self._delta = federation.privatise.at_delta
        self._optimiser = self._rule.optimiser()

    def step(self, model: Vector, rows: Matrix, tiers: Sequence[str] = (), records: Sequence[int] = ()) -> Vector:
        """The next model; row i was sent under privacy label i, and trained on so many records."""
        shares = [float(count) for count in records] if self._rule.weights == "records" else self._shares(tiers)
        update = self._rule.aggregate(rows, shares, self._exact)
        if update.shape != model.shape:
            raise FederationError(f"combine: {self._rule.kind} gave shape {update.shape} for a model of {model.shape}")
        return self._optimiser.step(model, update)

    def _shares(self, tiers: Sequence[str]) -> Shares:
        if self._delta is None or self._rule.weights == "equal":
            return None
        return weights.RULES[self._rule.weights]([float(tier) for tier in tiers], self._delta)

    def state(self) -> dict[str, NDArray[Any]]:
        return dict(self._optimiser.state())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._optimiser.restore(state)
