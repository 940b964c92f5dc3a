"""`privatise: {kind: dpsgd}`: noise in every step of local training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_privacy.dp import sampled
from fl_privacy.dp.ledger import compose
from fl_privacy.steps.base import At, Guard, Privatise, Seat
from fl_privacy.tasks.catalog import TASKS

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.tasks.workload import Fit


class Dpsgd(Privatise):
    """DP-SGD: clips and adds noise in every local training step (unit: a record; adjacency: add or remove one)."""

    kind: Literal["dpsgd"] = "dpsgd"
    clip: float = Field(1.0, gt=0, description="largest norm of one record's gradient, over the whole model")
    delta: float = Field(1e-5, gt=0, lt=1)

    unit: ClassVar[str] = sampled.UNIT
    adjacency: ClassVar[str] = sampled.ADJACENCY

    def plan(self, federation: Federation, records: int, epsilon: float) -> sampled.Plan:
        """That of a site with so many records."""
        train = federation.task.train
        return sampled.plan(records, train.epochs, train.batch_size, self.clip, epsilon, self.delta)

    @property
    def at_delta(self) -> float:
        return self.delta

    def start(self, seat: Seat) -> Guard:
        return _PrivateTraining(self, seat)

    def over_run(self, federation: Federation, epsilon: float) -> tuple[float, float]:
        """As the ledger will compose it, for a site of average size."""
        entry = TASKS.get(federation.task.dataset)
        shares = len(entry.sites) if federation.task.partition.kind == "by-site" else len(federation.sites)
        plan = self.plan(federation, max(1, entry.train // shares), epsilon)
        composed = compose([plan.charge] * federation.rounds, self.delta)
        return plan.noise * plan.clip / plan.batch, composed


class _PrivateTraining(Guard):
    def __init__(self, terms: Dpsgd, seat: Seat) -> None:
        from fl_privacy.dp import per_record  # takes Opacus, which other sites do not need

        seat.work.once(per_record.check)
        self._seat, self._plan = seat, terms.plan(seat.federation, seat.records, seat.epsilon)
        self.charge = self._plan.charge

    def training(self, at: At) -> tuple[Fit, Fit]:
        from fl_privacy.dp import dpsgd

        private = sampled.Private(self._plan, self._seat.key(at, "noise"))
        return partial(dpsgd.fit, private=private), partial(dpsgd.fit, private=private.clean)
