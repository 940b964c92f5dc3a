"""The steps of an update between training and the wire: privatise, permute, compress, encode.

A `Step` is a choice in the config. `start` makes what runs at a site: `outward` for every update that leaves, in this
order, and `inward` for every model that arrives, in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from numpy.typing import NDArray

from fl_privacy.choices import Choice
from fl_privacy.coding import Coding, Payload
from fl_privacy.crypto import keys
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.dp.ledger import Charge
    from fl_privacy.tasks.workload import Fit, Workload

SLOTS = ("privatise", "permute", "compress", "encode")


@dataclass(frozen=True)
class At:
    """Which attempt at which round of which run."""

    run: str
    round: int
    attempt: str


@dataclass(frozen=True)
class Seat:
    """What a step finds at its site."""

    federation: Federation
    site: str
    work: Workload
    records: int  # that the site trains on
    state: Path | None  # the site's own folder

    def key(self, at: At, purpose: str) -> bytes:
        """Fresh for every use; seeded only where the federation asks to be repeatable."""
        if not self.federation.reproducible:
            return keys.fresh()
        return keys.derive(self.federation.seed.to_bytes(32, "big"), self.federation.name, at.round, self.site, purpose)


class Running:
    """A step at work. This one changes nothing and remembers nothing."""

    def inward(self, model: Vector, at: At) -> Vector:
        """The model that arrived for a round, as this site trains it."""
        return model

    def outward(self, update: Payload, at: At) -> Payload:
        """The update as the next step, or the wire, takes it."""
        return update

    def state(self) -> Mapping[str, NDArray[Any]]:
        """What the next round needs of this one. The site keeps it on its disk before anything is sent."""
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the state of the last round that this site took part in; empty before its first."""


class Step(Choice):
    """A choice at one arrow of an update's way."""

    def coding(self, before: Coding) -> Coding:
        """How an update travels after this step, given how it would without it."""
        return before

    def start(self, seat: Seat) -> Running:
        return Running()


class Guard(Running):
    """A privatising step at work: what a round costs, and how training itself is made private."""

    charge: Charge | None = None

    def training(self, at: At) -> tuple[Fit, Fit] | None:
        """Private training in place of the plain one, and the same without clipping and noise, to score attacks."""
        return None


class Privatise(Step):
    """A choice for `privatise`: what it protects, and what that costs."""

    unit: ClassVar[str | None] = None  # what is protected: a site or a record
    after_training: ClassVar[bool] = False  # the noise is added to the update, so its size is known

    def start(self, seat: Seat) -> Guard:
        return Guard()

    @property
    def at_delta(self) -> float | None:
        """The delta that its budgets are meant at; none without a budget."""
        return None

    def over_run(self, federation: Federation, epsilon: float) -> tuple[float, float]:
        """Noise on every parameter of an update, and epsilon after all rounds, for a site with this budget."""
        raise TypeError(f"{self.kind} has no budget")

    def missing(self, epsilon: float, weakest: float) -> float:
        """Standard deviation that tops up the noise of `epsilon` to that of the smaller budget `weakest`."""
        raise TypeError(f"{self.kind} adds no noise to an update")


class Off(Privatise):
    """Nothing is done at this step."""

    kind: Literal["none"] = "none"
