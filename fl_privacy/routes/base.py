"""A route: how updates get from the sites to whoever combines them. Both of its ends are in one file.

Other code asks the route itself: site and server ask for their ends, launching and certificates for its parties, `plan`
for its cost, the config for its demands. No other code tests its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import Field

from fl_privacy.choices import Choice, Model
from fl_privacy.coding import Payload
from fl_privacy.errors import ConfigError
from fl_privacy.identity.keyring import Identity
from fl_privacy.reading import DIGEST, NAME
from fl_privacy.round.terms import Terms
from fl_privacy.routes.parts import Parts, Whole
from fl_privacy.scores.form import Counts
from fl_privacy.steps.base import At
from fl_privacy.theory.cost import Cost
from fl_privacy.vector import Layout, Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.identity.keyring import Keyring
    from fl_privacy.ops.metrics import Metrics
    from fl_privacy.rns.residues import Residues
    from fl_privacy.round.sent import Sent
    from fl_privacy.steps.base import Foretold
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


UPDATES = "every update and who sent it"
SIMULATION = "simulation"  # the engine


class Trust(Model):
    """Parties that learn this if they put together what they see: the sites trust them not to misuse it."""

    parties: tuple[Annotated[str, Field(pattern=NAME)], ...]
    learn: str = Field(UPDATES, pattern=r"^[ -~]{1,300}$")

    def __str__(self) -> str:
        who = f"{', '.join(self.parties)} together" if len(self.parties) > 1 else f"{self.parties[0]} alone"
        return f"{who} can see {self.learn}"


class Route(Choice, ABC):
    """A choice for `route`."""

    shows: ClassVar[str] = "rows"  # what the combining party gets from a round: rows, or a sum
    shows_owners: ClassVar[bool] = False  # and it combines them with the name of who sent each
    long_tickets: ClassVar[bool] = True  # one ticket may cover many rounds
    server_holds_model: ClassVar[bool] = True  # the server gives the federation its initial model, if nobody else does
    remembers: ClassVar[bool] = False  # its receivers keep what decoding needs of earlier rounds (`Coding.decoder`)
    carries_counts: ClassVar[bool] = False  # it adds up counts of evaluation, and has a farewell after the last round
    simulated: ClassVar[bool] = False  # it exists on the simulation engine only, to be compared with
    sends_models: ClassVar[bool] = False  # sites send each other models, not updates

    @property
    def carries_letters(self) -> bool:
        """Whether sites can leave each other messages at its first middleware before a run begins."""
        return False

    @property
    def exchanges(self) -> tuple[str, ...]:
        """What the server exchanges in a round, in order: calls to each process of the middleware, or, without any,
        messages with each site. `plan` and the cost count them.
        """
        return ("ticket", "receipt")

    @property
    def floor(self) -> int:
        """Fewest updates that may be released together."""
        return 1

    @property
    def needs_all_sites(self) -> bool:
        """Whether all sites must run at the same time, for the others in a round."""
        return False

    @property
    def tolerant(self) -> bool:
        """Whether a round may be settled while some of the middleware is missing."""
        return False

    @property
    def mixed_by(self) -> str:
        """What moves on its own in what is released: whole models, their layers or parameters."""
        return "model"

    @property
    def joins_every_round(self) -> bool:
        """Whether an evaluator is needed after every round, also if sites evaluate: it cuts the model for the next."""
        return False

    def parties(self) -> list[tuple[str, str]]:
        """Role and name of every process that this route adds to SuperLink, server and sites."""
        return []

    def middleware(self) -> list[str]:
        """The parties that sites submit to, in order."""
        return []

    def submits_to(self, federation: Federation, site: str) -> list[str]:
        """The middleware that a site submits to and knows the address of, in order; usually all of it."""
        return self.middleware()

    def released_with(self, federation: Federation, site: str) -> Sequence[str]:
        """The sites, itself among them, whose updates may be released together with this site's."""
        return federation.site_names

    def observers(self, federation: Federation) -> list[str]:
        """Whose views its server end records under `audit: true`, besides those that parties record themselves."""
        return []

    def problems(self, federation: Federation) -> Iterator[str]:
        rule = federation.combine
        if rule.needs_rows and self.shows != "rows":
            yield f"combine.kind: {rule.kind} needs single updates, and route {self.kind} gives a sum; use fedavg"
        elif rule.needs_rows and not rule.coordinatewise and self.mixed_by != "model":
            mixed = f"rows of route {self.kind} are mixed by {self.mixed_by}"
            yield f"combine.kind: {rule.kind} needs whole updates, and {mixed}; use median or level: model"
        if rule.needs_owners and not self.shows_owners:
            yield f"combine.kind: {rule.kind} needs to know who sent what, which route {self.kind} hides; use server"

    def parts(self, federation: Federation, parameters: int) -> Parts:
        """How a vector with one number per parameter is split over the receivers of an update."""
        return Whole()

    def trust(self, federation: Federation) -> list[Trust]:
        """The smallest sets of parties that must not collude; unless a route knows better, each of them alone."""
        return [Trust(parties=(name,)) for name in ("server", *self.middleware())]

    def together(self, tiers: Sequence[str], organisations: Sequence[str], least: int) -> list[tuple[int, ...]]:
        """Which updates are released as one set: a floor holds for each set. Unless a route divides them, all are."""
        return [tuple(range(len(tiers)))]

    def partial_sums(
        self, federation: Federation, recorded: Mapping[str, Payload]
    ) -> list[tuple[Sequence[str], int, Vector]]:
        """Sums of known parts of a cohort in the server's record of a round: whose, of how many, and the sum."""
        return []

    def summed(self, federation: Federation, parameters: int, recorded: Mapping[str, Payload]) -> Residues | None:
        """The sum of all updates' residues, from what the server recorded of a round; None where it gets none."""
        return None

    def recombinations(self, parameters: int) -> float | None:
        """log10 of the ways to reassemble one update from what is released; None unless values are mixed."""
        return None

    def published(self, federation: Federation, size: int, rate: float) -> float | None:
        """Least seconds of a round by the formula of its paper, if it has one; `size` is the model's in bytes."""
        return None

    def foretell(self, federation: Federation, parameters: int) -> Foretold | None:
        """What else `plan` says of this route."""
        return None

    def check_launch(self, federation: Federation) -> None:
        """Refuse what the config alone does not show, before a process starts."""

    @abstractmethod
    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        """The cost of one full round for one party of each kind."""

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        """The cost of what a run does once, in the same form: the first model, and the last one to all sites."""
        return []

    @abstractmethod
    def site(self, seat: SiteSeat) -> SiteEnd:
        """This site's end."""

    @abstractmethod
    def server(self, seat: ServerSeat) -> ServerEnd:
        """The server's end."""


def check_engine(route: Route, engine: str) -> None:
    """Refuse to deploy a route that exists in simulation only."""
    if route.simulated and engine != SIMULATION:
        raise ConfigError(f"route.kind: {route.kind} exists in simulation only; use --engine simulation, not {engine}")


def check_party(route: Route, name: str) -> None:
    """Refuse to be a process that this route does not have."""
    has = [party for _, party in route.parties()]
    if name not in has:
        raise ConfigError(f"route.kind: {route.kind} has no {name}; its processes are {', '.join(has) or 'none'}")


R = TypeVar("R", bound=Route)


def only(route: Route, kind: type[R], role: str) -> R:
    """The route as the type that has this role, for the process of the role."""
    if not isinstance(route, kind):
        raise ConfigError(f"route.kind: {route.kind!r} has no {role}; use {kind.model_fields['kind'].default}")
    return route


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


def by_parameter(federation: Federation, who: str) -> Iterator[str]:
    """The problem of routes that move or split updates by parameter, if the coding has no numbers per parameter."""
    if not federation.coding.per_parameter and not federation.coding.by_part:
        yield f"encode: {federation.coding.name} has no numbers per parameter, which {who} needs; use none"


def farewells(federation: Federation) -> int:
    """Models after the last round: where sites evaluate, the best is known only after the final one."""
    return 2 if federation.sites_evaluate else 1


def tickets(federation: Federation) -> float:
    """Flower messages per site and round: a ticket and its receipt, shared by all rounds of the ticket."""
    return 2 / federation.rounds_per_ticket
