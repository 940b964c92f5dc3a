"""The steps of an update between training and the wire: privatise, permute, compress, encode.

A `Step` is a choice in the config. `start` makes what runs at a site: `outward` for every update that leaves, in this
order, and `inward` for every model that arrives, in reverse order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from numpy.typing import NDArray

from fl_privacy.choices import Choice
from fl_privacy.coding import Coding, Payload
from fl_privacy.crypto import keys
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.agreement.secret import Secrets
    from fl_privacy.config import Federation
    from fl_privacy.dp.ledger import Charge
    from fl_privacy.tasks.workload import Fit, Workload

SLOTS = ("privatise", "permute", "compress", "encode")


@dataclass(frozen=True)
class At:
    """Which attempt at which round of which run, and what is wanted besides an update."""

    run: str
    round: int
    attempt: str
    counts: int = field(default=0, kw_only=True)  # numbers in the counts of an evaluation; 0: none are wanted
    farewell: int = field(default=0, kw_only=True)  # the round whose model every site gets to keep; no update is wanted
    best: int = field(default=0, kw_only=True)  # the round with the best model so far, if known
    nonce: bytes = field(default=b"", kw_only=True)  # of the run

    @property
    def version(self) -> int:
        """The round that made the model; 0 for the first one."""
        return self.farewell or self.round - 1

    @property
    def where(self) -> dict[str, Any]:
        """The three by name, for messages and log events."""
        return {"run": self.run, "round": self.round, "attempt": self.attempt}


@dataclass(frozen=True)
class WithOwn(At):
    """Where sites have several models, some of which stay as they are for rounds."""

    made: int = field(kw_only=True)  # the round that made this site's model

    @property
    def version(self) -> int:
        return self.made


@dataclass(frozen=True)
class Seat:
    """What a step has available at its site."""

    federation: Federation
    site: str
    work: Workload
    records: int  # how many the site trains on
    state: Path | None  # the site's own folder
    secrets: Secrets | None = None  # where the sites agree on a secret

    @property
    def budget(self) -> float:
        """The site's epsilon for `federation.budget_rounds` rounds; the config is checked for it."""
        return self.federation.site(self.site).budget or 0.0

    def repeatable_key(self, at: At, purpose: str) -> bytes:
        """Public, and the same for every attempt at a round: a repeated attempt shows no other part of an update."""
        if self.federation.reproducible:
            return self.key(at, purpose)
        return keys.derive(bytes.fromhex(self.federation.digest), at.run, at.round, self.site, purpose)

    def key(self, at: At, purpose: str) -> bytes:
        """Fresh for every use; seeded only if the federation is reproducible."""
        return single_use_key(self.federation, at, self.site, purpose)


def single_use_key(federation: Federation, at: At, site: str, purpose: str) -> bytes:
    """Fresh for every use; seeded only if the federation is reproducible."""
    if not federation.reproducible:
        return keys.fresh()
    return keys.derive(federation.seed.to_bytes(32, "big"), federation.name, at.round, site, purpose)


class Running:
    """A running step. This one changes nothing and keeps no state."""

    def inward(self, model: Vector, at: At) -> Vector:
        """The model received for a round, in the form that this site trains."""
        return model

    def compare(self, held: Sequence[bytes]) -> None:
        """What each receiver of a part of the update says that it holds of this site (`Decoder.held`)."""

    def outward(self, update: Payload, at: At) -> Payload:
        """The update in the form that the next step, or the wire, takes."""
        return update

    def stamp(self, at: At) -> bytes:
        """What goes with the upload, `Step.stamp_bytes` long: the server compares those of all sites."""
        return b""

    def truth(self, at: At) -> Mapping[str, NDArray[Any]]:
        """What scoring an attack needs to know of this step; for sites that record the truth."""
        return {}

    def notes(self) -> Mapping[str, Any]:
        """What the site logs of the update that just left this step; it stays at the site."""
        return {}

    def state(self) -> Mapping[str, NDArray[Any]]:
        """What the next round needs from this one. The site saves it to disk before it sends anything."""
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the state after this site's last round; it is empty before the first."""


class Foretold(NamedTuple):
    """What `plan` says of a step: facts for machines, and lines for people."""

    facts: Mapping[str, Any]
    lines: Sequence[str]


class Step(Choice):
    """A choice for one step of an update's path."""

    agrees: ClassVar[bool] = False  # its sites have a common secret that the server does not know
    closes: ClassVar[bool] = False  # models are readable at the sites alone
    own_start: ClassVar[bool] = False  # the sites make the first model, and the server never holds it
    stamp_bytes: ClassVar[int] = 0  # that go with every upload

    def first(self, model: Vector) -> Vector:
        """What the server starts from, where the federation's first model is this one."""
        return model

    def check(self, federation: Federation) -> None:
        """Refuse a model that this step cannot take, before anything is started."""

    def coding(self, before: Coding) -> Coding:
        """How an update travels after this step, given how it would travel without it."""
        return before

    def coded(self, before: Coding, federation: Federation) -> Coding:
        """The same for a step whose coding depends on more of the config than the step's own fields."""
        return self.coding(before)

    @property
    def kept(self) -> float:
        """Share of an update's coordinates that leave the site, where the data do not decide which; for `plan`."""
        return 1.0

    def packed(self, parameters: int) -> int | None:
        """Bytes of an update in a compressed form that is simulated but not sent; None if there is no such form."""
        return None

    def foretell(self, federation: Federation) -> Foretold | None:
        """What else `plan` says of this step."""
        return None

    def start(self, seat: Seat) -> Running:
        return Running()


class Guard(Running):
    """A running privatising step: what a round costs, and how training itself is made private."""

    charge: Charge | None = None

    def training(self, at: At) -> tuple[Fit, Fit] | None:
        """Private training that replaces plain training, and the same without clipping and noise, to score attacks."""
        return None


class Privatise(Step):
    """A choice for `privatise`: what it protects, and what that costs."""

    unit: ClassVar[str | None] = None  # what is protected: a site or a record
    adjacency: ClassVar[str | None] = None  # how neighbours differ: replace, or add-or-remove
    after_training: ClassVar[bool] = False  # noise is added to the finished update, so its scale is known
    imports: ClassVar[tuple[str, ...]] = ()  # modules that only such sites need: those that are forks share them

    def start(self, seat: Seat) -> Guard:
        return Guard()

    @property
    def at_delta(self) -> float | None:
        """The delta of its budgets; None without a budget."""
        return None

    @property
    def norm(self) -> float | None:
        """The norm to which every site clips its update; None if updates are not clipped."""
        return None

    # A budget is the epsilon of `federation.budget_rounds` rounds.

    def noise(self, federation: Federation, budget: float) -> float:
        """Noise per parameter of an update at a site with this budget."""
        raise TypeError(f"{self.kind} has no budget")

    def charge(self, federation: Federation, budget: float) -> Charge | None:
        """What an update costs, as far as the config alone decides it; None if it depends on a site's records."""
        return None

    def epsilon_after(self, federation: Federation, budget: float, rounds: int) -> float:
        """Epsilon of so many rounds at a site with this budget."""
        raise TypeError(f"{self.kind} has no budget")

    def bound(self, federation: Federation) -> float | None:
        """What no coordinate of a privatised update exceeds, but by an unlikely draw; None if the config tells none."""
        return None

    def deviations(self, federation: Federation) -> tuple[float, ...] | None:
        """The noise of every site, up to a factor that all share, by public inputs; None where these do not say."""
        if not self.after_training:
            return None
        return tuple(self.noise(federation, site.budget or 0.0) for site in federation.sites)

    def evenly(self) -> Privatise:
        """The same where it divides noise among sites, but as much for each."""
        return self

    def missing(self, federation: Federation, budget: float, weakest: float) -> float:
        """Standard deviation that tops up the noise of `budget` to that of the smaller budget `weakest`."""
        raise TypeError(f"{self.kind} adds no noise to an update")


class Off(Privatise):
    """Leaves updates and models unchanged."""

    kind: Literal["none"] = "none"
