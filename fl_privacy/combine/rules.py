"""How a round's updates are combined: a rule turns them into one, and an optimiser applies it to the model.

The server and every shard aggregator combine by the same `Combiner`, which owns the optimiser's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.choices import Choice
from fl_privacy.coding import Coding, Payload
from fl_privacy.combine import mean, optimiser, weights
from fl_privacy.combine.mean import Shares
from fl_privacy.errors import FederationError
from fl_privacy.registry import Registry
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fl_privacy.config import Federation
    from fl_privacy.steps.base import Running, Seat

Matrix = NDArray[np.float32]
Forward = Callable[[Vector, NDArray[np.float32]], NDArray[np.float32]]  # a model's outputs for records
LAST = "last"  # in a combiner's state


@dataclass(frozen=True)
class Beside:
    """What is known beside the rows of a round."""

    shares: Shares
    exact: bool  # the bits of the result must not depend on the order of the rows
    owners: Sequence[str] = ()  # who sent each row, on routes that say so
    last: Vector | None = None  # the result of the round before, for rules that continue from it


class Placed(NamedTuple):
    """What was decided about one site in one round: its group of this round (-1: none), and its cluster."""

    site: str
    group: int
    before: int | None
    after: int | None
    nearest: float  # distance to the most similar other model


class Grouped(NamedTuple):
    """A round's next models by name, and all that was measured and decided, for the transcript."""

    models: dict[str, Vector]
    arrays: dict[str, NDArray[Any]]
    placed: list[Placed]
    reasons: list[str]
    noted: dict[str, float]


class Grouping(Protocol):
    """A run of a rule that gives groups of sites models of their own."""

    @property
    def holders(self) -> Mapping[str, str]:
        """The name of the model that every site starts from and may see."""

    @property
    def made(self) -> Mapping[str, int]:
        """By name the round that made each model; 0: the first one."""

    def step(
        self, models: Mapping[str, Vector], rows: Payload, tiers: Sequence[str], owners: Sequence[str]
    ) -> Grouped: ...

    def state(self) -> dict[str, NDArray[Any]]: ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None: ...


class Rule(Choice):
    """A way to combine. Subclasses override `aggregate`, `optimiser` or both; those that need more, `combined`."""

    needs_rows: ClassVar[bool] = False  # if not, the sum of the updates is enough
    needs_owners: ClassVar[bool] = False  # and who sent each row
    continues: ClassVar[bool] = False  # it needs the result of the round before
    coordinatewise: ClassVar[bool] = True  # so a shard can be combined by itself
    translates: ClassVar[bool] = True  # updates that are all moved by one vector give a result moved by it
    weighable: ClassVar[bool] = True
    several: ClassVar[bool] = False  # groups of sites have models of their own: see `grouping`

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

    def combined(self, rows: Matrix, beside: Beside) -> Vector:
        """The same for a rule that needs to know more."""
        return self.aggregate(rows, beside.shares, beside.exact)

    def optimiser(self) -> optimiser.Optimiser:
        return optimiser.FedAvg(self.lr)

    def rules(self) -> Sequence[Rule]:
        """This one, and those that it uses for a part of the updates."""
        return (self,)

    def coded(self, before: Coding, federation: Federation) -> Coding:
        """How an update travels, for a rule that needs something beside it."""
        return before

    def start(self, seat: Seat) -> Running:
        """What a site adds for this rule, after its steps."""
        from fl_privacy.steps.base import Running

        return Running()

    def grouping(self, federation: Federation, forward: Forward) -> Grouping:
        """A new run of a rule with `several` models."""
        raise TypeError(f"{self.kind} has one model")

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
    translates: ClassVar[bool] = False

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


OURS = (FedAvg, FedProx, FedAdam, FedYogi)
NAMES = {rule.model_fields["kind"].default: f"{__name__}:{rule.__name__}" for rule in OURS}
ROBUST = {
    "median": "Median",
    "trimmed-mean": "TrimmedMean",
    "krum": "Krum",
    "multi-krum": "MultiKrum",
    "bulyan": "Bulyan",
    "geometric-median": "GeometricMedian",
    "centred-clipping": "CentredClipping",
    "norm-bounding": "NormBounding",
    "fltrust": "FLTrust",
}
NAMES |= {kind: f"fl_privacy.combine.robust_rules:{name}" for kind, name in ROBUST.items()}
INNER: Registry[type[Rule]] = Registry("fl_privacy.rules", NAMES, Rule)  # for one group of sites
RULES: Registry[type[Rule]] = Registry(
    "fl_privacy.rules", {**NAMES, "clusters": "fl_privacy.combine.clusters.rule:Clusters"}, Rule
)


class Combiner:
    """A federation's rule and the optimiser's state, for the party that holds the model or a shard of it."""

    def __init__(self, federation: Federation, rule: Rule | None = None) -> None:
        """With another rule than the federation's, for a part of it."""
        self._rule, self._exact = rule or federation.combine, federation.reproducible
        self._delta = federation.privatise.at_delta
        self._optimiser = self._rule.optimiser()
        self._last: Vector | None = None

    def step(
        self,
        model: Vector,
        rows: Matrix,
        tiers: Sequence[str] = (),
        records: Sequence[int] = (),
        owners: Sequence[str] = (),
    ) -> Vector:
        """The next model; row i was sent under privacy label i by owner i, and trained on so many records."""
        shares = [float(count) for count in records] if self._rule.weights == "records" else self._shares(tiers)
        update = self._rule.combined(rows, Beside(shares, self._exact, owners, self._last))
        if update.shape != model.shape:
            raise FederationError(f"combine: {self._rule.kind} gave shape {update.shape} for a model of {model.shape}")
        if self._rule.continues:
            self._last = update
        return self._optimiser.step(model, update)

    def _shares(self, tiers: Sequence[str]) -> Shares:
        if self._delta is None or self._rule.weights == "equal":
            return None
        return weights.RULES[self._rule.weights]([float(tier) for tier in tiers], self._delta)

    def state(self) -> dict[str, NDArray[Any]]:
        return self._optimiser.state() | ({} if self._last is None else {LAST: self._last.copy()})

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._optimiser.restore({name: array for name, array in state.items() if name != LAST})
        self._last = np.array(state[LAST], np.float32) if LAST in state and self._rule.continues else None
