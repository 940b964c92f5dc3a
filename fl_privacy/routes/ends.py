"""What the two ends of a route get, and what each does: at a site, and at the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.coding import Payload
from fl_privacy.errors import ConfigError
from fl_privacy.identity.keyring import Identity
from fl_privacy.reading import DIGEST
from fl_privacy.round.terms import Terms
from fl_privacy.scores.form import Counts
from fl_privacy.steps.base import At
from fl_privacy.vector import Layout, Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.identity.keyring import Keyring
    from fl_privacy.ops.metrics import Metrics
    from fl_privacy.round.sent import Sent
    from fl_privacy.transcript.events import Event


class Ticket(Model):
    """What the server may ask of a site: the rounds `first` to `last` of a run, and nothing else.

    A site reads the round's terms from the middleware; on a route without one, the ticket has them.
    """

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    federation: str = Field(pattern=DIGEST, description="digest of the federation's config")
    first: int = Field(ge=1, le=2**31)
    last: int = Field(ge=1, le=2**31)
    terms: str = Field("", max_length=4096, description="of the attempt: fl_privacy.round.terms")
    place: str = Field("", max_length=4096, description="of the model, where sites have several: round.own_models")
    made: int = Field(-1, ge=-1, le=2**31, description="the round that made it, where sites have several; -1: the last")


@dataclass(frozen=True)
class Ask(At):
    """One attempt at one round, as the server starts it."""

    cohort: list[str]
    terms: Terms
    salt: bytes  # of the cohort's root
    made: int = field(default=-1, kw_only=True)  # the round that made the model, where sites have several

    @classmethod
    def of(cls, terms: Terms, cohort: list[str], salt: bytes) -> Ask:
        return cls(cohort=cohort, terms=terms, salt=salt, **vars(terms.at))


@dataclass
class Outcome:
    """What the server received: rows and tiers (on routes that show it any), receipts, and the number of bytes.

    On routes that show only a sum, `mean` is what it decodes to. `noted` is added to the round's line of metrics.

    `counts` is the sum of the counts of `counted` sites, and `seen` all that it received of them, for its record.
    Where sites make the next models themselves, `models` has these by site, and `kept` what the route needs of this
    round to continue; both are saved with the checkpoint.
    """

    count: int
    rows: Payload | None = None
    tiers: list[str] = field(default_factory=list)
    receipts: list[Event] = field(default_factory=list)
    received: int = 0
    counts: Counts | None = None
    counted: int = 0
    seen: dict[str, Payload] = field(default_factory=dict)
    models: dict[str, Vector] | None = None
    kept: dict[str, Payload] = field(default_factory=dict)
    mean: Vector | None = None
    noted: dict[str, float] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)  # who sent each row, on routes that say so


@dataclass(frozen=True)
class Held:
    """What a run holds after its last round: models by name, and what the route asked to keep."""

    models: Mapping[str, Vector]
    kept: Mapping[str, Payload]


def nothing_held() -> Held:
    """Before the first round."""
    return Held({}, {})


class Invitations(Protocol):
    """How the server reaches the sites: tickets through Flower, and the replies to them."""

    def invite(self, ask: Ask, model: Vector | None = None, place: str = "") -> None:
        """Make sure that every site of the cohort holds a ticket for this round."""

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        """(site, status, update) of the replies since the last call; sites that came back are invited again."""


@dataclass(frozen=True)
class Seat:
    """What a route has available at either end."""

    federation: Federation
    layout: Layout
    keys: Keyring
    middleware: Sequence[str]

    @property
    def peers(self) -> list[tuple[str, Identity]]:
        """The address and the identity of every middleware, in order."""
        return peers(self.federation, self.middleware)


class Witnessed(Protocol):
    """A site's ledger, as the middleware's witness knows it."""

    def check_witness(self, found: Iterable[bytes]) -> None:
        """Refuse to continue with a ledger that is behind one of these statements of its head."""

    def statement(self) -> bytes:
        """The signed head of the ledger; empty without one."""


class NoLedger:
    """A site that charges nothing."""

    def check_witness(self, found: Iterable[bytes]) -> None: ...

    def statement(self) -> bytes:
        return b""


NO_LEDGER = NoLedger()


def no_head(run: str) -> bytes | None:
    """A site that records nothing."""
    return None


def no_holders() -> Mapping[str, str]:
    """All sites start from the one model."""
    return {}


def none_made() -> Mapping[str, int]:
    """Every model was made in the round before."""
    return {}


def no_model() -> Vector:
    raise ConfigError("model: this party has no initial model")


def no_stamp(at: At) -> bytes:
    """A site whose steps have none."""
    return b""


def no_log(event: str, **fields: Any) -> None:
    """A party without a log."""


@dataclass(frozen=True)
class SiteSeat(Seat):
    """`middleware`: all of it, or what the site submits to."""

    site: str
    tier: str
    floor: Callable[[], int]  # fewest organisations that this site wants to be released with, now
    sent: Sent
    metrics: Metrics
    head: Callable[[str], bytes | None] = no_head  # of what the site recorded of a run
    ledger: Witnessed = NO_LEDGER
    records: int = 0  # that this site trains on, where the federation weights updates by them
    state: Path | None = None  # the site's own folder
    initial: Callable[[], Vector] = no_model  # the federation's first model
    log: Callable[..., None] = no_log
    stamp: Callable[[At], bytes] = no_stamp  # that goes with an upload

    @property
    def peers(self) -> list[tuple[str, Identity]]:
        return peers(self.federation, self.middleware, self.site)

    def facts(self, model: bytes) -> dict[str, Any]:
        """What a site knows itself of an attempt's terms; `model` is the digest of what it received."""
        roster = self.keys.roster()
        known: dict[str, Any] = {"federation": self.federation.digest, "roster": roster.digest, "model": model}
        return {**known, "layout": self.layout.digest, "recipient": roster.key_of("server", "server")}


@dataclass(frozen=True)
class ServerSeat(Seat):
    sites: Invitations
    held: Callable[[], Held] = nothing_held
    views: Path | None = None  # of this run, where the route itself records what simulated parties see
    initial: Callable[[], Vector] = no_model
    holders: Callable[[], Mapping[str, str]] = no_holders  # by site the model that it starts from, if there are several
    made: Callable[[], Mapping[str, int]] = none_made  # by name the round that made each of several models


class SiteEnd(Protocol):
    """What a site does on a route."""

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        """The rounds of a ticket as they open, with the model that each starts from; nothing is checked yet."""

    def admit(self, at: At, model: Vector) -> None:
        """Refuse a round whose terms are not what this site, and every middleware, holds itself."""

    def held(self) -> Sequence[bytes]:
        """What the receiver of each part of this site's updates says that it holds of the site."""

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        """Send an update (none at a farewell), with the counts of an evaluation if the round has any."""

    def abstain(self, at: At) -> None:
        """Send nothing in this attempt, so that nobody waits for this site."""

    def reply(self) -> Payload | None:
        """What the site sends back through Flower with the receipt."""


class ServerEnd(Protocol):
    """What the server does on a route."""

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        """What stands for the model after a round in the terms of an attempt."""

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        """One attempt at a round."""

    def confirm(self, ask: Ask) -> None:
        """What the attempt gave is on the server's disk: nobody has to keep it any longer."""

    def copies(self, ask: Ask) -> int:
        """How many copies of the model the server sends in a round."""

    def finish(self, run: str) -> list[bytes]:
        """The run is over; the signed heads of what other parties recorded of it."""


def peers(federation: Federation, addresses: Sequence[str], site: str | None = None) -> list[tuple[str, Identity]]:
    """Which middleware is dialled at which address, both in the route's order; of a site's, the one it submits to."""
    route, names = federation.route, federation.route.middleware()
    wanted = names if site is None else route.submits_to(federation, site)
    if len(addresses) == len(names):
        at = dict(zip(names, addresses, strict=True))
    elif len(addresses) == len(wanted):
        at = dict(zip(wanted, addresses, strict=True))
    else:
        raise ConfigError(f"middleware: {len(addresses)} addresses; route {route.kind} needs {len(wanted)}")
    roles = {name: role for role, name in route.parties()}
    return [(at[name], Identity(federation.name, roles[name], name)) for name in wanted]
