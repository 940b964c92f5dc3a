"""`privatise: {kind: ldp}`: noise on the trained update."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_privacy.dp import gaussian, ldp
from fl_privacy.steps.base import At, Guard, Privatise, Seat
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation


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

    def start(self, seat: Seat) -> Guard:
        return _Noise(self, seat)

    def over_run(self, federation: Federation, epsilon: float) -> tuple[float, float]:
        """Gaussians compose exactly."""
        sigma = gaussian.sigma(epsilon, self.delta) / federation.rounds**0.5
        return ldp.scale(self.clip, epsilon, self.delta), gaussian.epsilon(sigma, self.delta)

    def missing(self, epsilon: float, weakest: float) -> float:
        return ldp.missing(self.clip, epsilon, weakest, self.delta)


class _Noise(Guard):
    def __init__(self, terms: Ldp, seat: Seat) -> None:
        self._terms, self._seat, self.charge = terms, seat, ldp.charge(seat.epsilon, terms.delta)

    def outward(self, update: Vector, at: At) -> Vector:
        terms, key = self._terms, self._seat.key(at, "noise")
        return ldp.privatise(update, terms.clip, self._seat.epsilon, terms.delta, key)
