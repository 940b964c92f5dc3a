"""`privatise: {kind: dpsgd}`: noise in every step of local training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_privacy.dp import sampled
from fl_privacy.dp.ledger import compose
from fl_privacy.errors import ConfigError
from fl_privacy.steps.base import At, Foretold, Guard, Privatise, Seat
from fl_privacy.steps.privatise import allocated

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.tasks.workload import Fit

FITTED = "is scaled by the site's own records, which the budget of dpsgd does not cover"


class Dpsgd(Privatise):
    """DP-SGD: clips and adds noise in every local training step (unit: a record; adjacency: add or remove one)."""

    kind: Literal["dpsgd"] = "dpsgd"
    clip: float = Field(1.0, gt=0, description="largest norm of one record's gradient, over the whole model")
    delta: float = Field(1e-5, gt=0, lt=1)
    allocation: Literal["epsilon", "fulcrum", "uniform"] = Field(
        "epsilon", description="noise by each site's own epsilon, or a budget divided by leverage or evenly"
    )
    budget: float | None = Field(None, gt=0, description="of an allocation: the sum of variances on the mean gradient")
    window: int | None = Field(
        None, ge=1, description="of an allocation: noised steps that are observed; default: those of the largest site"
    )
    floor: bool = Field(True, description="of an allocation: no site gets less noise than its own epsilon demands")

    unit: ClassVar[str] = sampled.UNIT
    adjacency: ClassVar[str] = sampled.ADJACENCY
    imports: ClassVar[tuple[str, ...]] = ("fl_privacy.dp.dpsgd", "opacus.validators")

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if field := federation.task.train.regularised:
            yield f"task.train.{field}: is not supported with privatise.kind dpsgd, which clips each record; remove it"
        if not federation.task.is_own and (data := federation.task.data_set).preprocessing != "public":
            yield f"task.dataset: {federation.task.dataset} {FITTED}; use options: {data.public_with}, or ldp"
        yield from allocated.problems(self, federation)

    def foretell(self, federation: Federation) -> Foretold | None:
        return allocated.foretold(self, federation) if self.allocates else None

    @property
    def allocates(self) -> bool:
        """Whether a site's noise follows from other sites' public facts too."""
        return self.allocation != "epsilon"

    def plan(self, federation: Federation, records: int, budget: float) -> sampled.Plan:
        """That of a site with so many records."""
        train, rounds = federation.task.train, federation.budget_rounds
        return sampled.plan(records, train.epochs, train.batch_size, self.clip, budget, self.delta, rounds)

    def deviations(self, federation: Federation) -> tuple[float, ...] | None:
        return tuple(allocated.shares(self, federation).chosen.tolist()) if self.allocates else None

    def evenly(self) -> Dpsgd:
        return self.model_copy(update={"allocation": "uniform"}) if self.allocates else self

    @property
    def at_delta(self) -> float:
        return self.delta

    def start(self, seat: Seat) -> Guard:
        return _PrivateTraining(self, seat)

    def noise(self, federation: Federation, budget: float) -> float:
        """That of one step at a site of average size; of an allocation, the least that a site with this budget gets."""
        allocates = self.allocates
        plan = allocated.weakest(self, federation, budget) if allocates else self._average(federation, budget)
        return plan.noise * plan.clip / plan.batch

    def epsilon_after(self, federation: Federation, budget: float, rounds: int) -> float:
        """As the ledger will compose it, for a site of average size. With an allocation it is at most that."""
        return compose([self._average(federation, budget).charge] * rounds, self.delta)

    def _average(self, federation: Federation, budget: float) -> sampled.Plan:
        return self.plan(federation, federation.task.typical_records(len(federation.sites)), budget)


class _PrivateTraining(Guard):
    def __init__(self, terms: Dpsgd, seat: Seat) -> None:
        from fl_privacy.dp import per_record  # takes Opacus, which other sites do not need

        if seat.work.task.preprocessing != "public":
            label = seat.federation.task.label
            raise ConfigError(f"{label}: {FITTED}; if it is not, set preprocessing = 'public' in the task")
        seat.work.once(per_record.check, seat.work.site_data(seat.site))
        self._seat, self._plan = seat, terms.plan(seat.federation, seat.records, seat.budget)
        if terms.allocates:
            self._plan = allocated.own(terms, seat.federation, seat.site, self._plan)
        self.charge = self._plan.charge

    def training(self, at: At) -> tuple[Fit, Fit]:
        from fl_privacy.dp import dpsgd

        private = sampled.Private(self._plan, self._seat.key(at, "noise"))
        return partial(dpsgd.fit, private=private), partial(dpsgd.fit, private=private.clean)
