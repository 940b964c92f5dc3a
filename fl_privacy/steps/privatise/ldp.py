"""`privatise: {kind: ldp}`: noise on the trained update."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_privacy.dp import ldp
from fl_privacy.dp.ledger import Charge, compose
from fl_privacy.steps.base import At, Guard, Privatise, Seat
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

RARE = 6  # standard deviations


class Ldp(Privatise):
    """Clips the whole update and adds noise for the site's epsilon (unit: the site; adjacency: replacement)."""

    kind: Literal["ldp"] = "ldp"
    clip: float = Field(1.0, gt=0, description="largest norm of an update; the noise is 2 clip sigma(epsilon, delta)")
    delta: float = Field(1e-5, gt=0, lt=1)

    unit: ClassVar[str] = ldp.UNIT
    adjacency: ClassVar[str] = ldp.ADJACENCY
    after_training: ClassVar[bool] = True

    @property
    def at_delta(self) -> float:
        return self.delta

    @property
    def norm(self) -> float:
        return self.clip

    def start(self, seat: Seat) -> Guard:
        return _Noise(self, seat)

    def noise(self, federation: Federation, budget: float) -> float:
        return ldp.scale(self.clip, budget, self.delta, federation.budget_rounds)

    def charge(self, federation: Federation, budget: float) -> Charge:
        return ldp.charge(budget, self.delta, federation.budget_rounds)

    def epsilon_after(self, federation: Federation, budget: float, rounds: int) -> float:
        return compose([self.charge(federation, budget)] * rounds, self.delta)

    def bound(self, federation: Federation) -> float:
        """The clip, and the noise of the noisiest site in all but one of 5e8 draws."""
        budgets = {site.budget for site in federation.sites if site.budget is not None}
        return self.clip + RARE * max((self.noise(federation, budget) for budget in budgets), default=0.0)

    def missing(self, federation: Federation, budget: float, weakest: float) -> float:
        return ldp.missing(self.clip, budget, weakest, self.delta, federation.budget_rounds)


class _Noise(Guard):
    def __init__(self, terms: Ldp, seat: Seat) -> None:
        self._terms, self._seat, self._rounds = terms, seat, seat.federation.budget_rounds
        self.charge = ldp.charge(seat.budget, terms.delta, self._rounds)

    def outward(self, update: Vector, at: At) -> Vector:
        terms, key = self._terms, self._seat.key(at, "noise")
        return ldp.privatise(update, terms.clip, self._seat.budget, terms.delta, key, self._rounds)
