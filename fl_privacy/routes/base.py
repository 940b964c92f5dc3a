"""A route: how updates get from the sites to whoever combines them. Both of its ends stand in one file.

Whoever needs to know something of the route asks it: the site and the server for their ends, launching and
certificates for its parties, `plan` for its cost, the config for its demands. Nobody tests its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from pydantic import Field

from fl_privacy.choices import Choice, Model
from fl_privacy.coding import Payload
from fl_privacy.errors import ConfigError
from fl_privacy.steps.base import At
from fl_privacy.theory.cost import Cost
from fl_privacy.vector import Layout, Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.identity.keyring import Keyring
    from fl_privacy.ops.metrics import Metrics
    from fl_privacy.transcript.events import Event


class Ticket(Model):
    """What the server may ask of a site: the rounds `first` to `last` of a run, and nothing else.

    What a round is, a site reads from the middleware; a route without one names the attempt in the ticket.
    """

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    federation: str = Field(pattern=r"^[0-9a-f]{64}$", description="digest of the federation's config")
    first: int = Field(ge=1, le=2**31)
    last: int = Field(ge=1, le=2**31)
    attempt: str = Field("", pattern=r"^[0-9a-f]{0,64}$")


@dataclass(frozen=True)
class Ask:
    """One attempt at one round, as the server starts it."""

    run: str
    round: int
    attempt: str
    cohort: list[str]

    @property
    def at(self) -> At:
        return At(self.run, self.round, self.attempt)


@dataclass
class Outcome:
    """What the server received: rows and tiers on the routes that show it any, receipts, and bytes."""

    count: int
    rows: Payload | None = None
    tiers: list[str] = field(default_factory=list)
    receipts: list[Event] = field(default_factory=list)
    received: int = 0


class Invitations(Protocol):
    """The server's way to the sites: tickets through Flower, and their answers."""

    def invite(self, ask: Ask, model: Vector | None = None) -> None:
        """See to it that every site of the cohort holds a ticket for this round."""

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        """(site, status, update) of what came since the last call; sites that came back are invited again."""


@dataclass(frozen=True)
class SiteSeat:
    """What a route finds at a site."""

    federation: Federation
    layout: Layout
    keys: Keyring
    middleware: Sequence[str]
    tier: str
    metrics: Metrics


@dataclass(frozen=True)
class ServerSeat:
    """What a route finds at the server."""

    federation: Federation
    layout: Layout
    keys: Keyring
    middleware: Sequence[str]
    sites: Invitations


class SiteEnd(Protocol):
    """What a site does on a route."""

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        """The rounds of a ticket as they open, with the model that each starts from."""

    def deliver(self, at: At, payload: Payload) -> None:
        """Send an update."""

    def reply(self) -> Payload | None:
        """What goes back through Flower with the receipt."""


class ServerEnd(Protocol):
    """What the server does on a route."""

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        """One attempt at a round."""

    def copies(self, ask: Ask) -> int:
        """How often the server sends the model out in a round."""

    def finish(self, run: str) -> None:
        """The run is over."""


class Route(Choice, ABC):
    """A choice for `route`."""

    exchanges: ClassVar[tuple[str, ...]] = ("submit", "collect")  # of every round, in order
    shows: ClassVar[str] = "rows"  # what whoever combines gets of a round: rows, or a sum
    long_tickets: ClassVar[bool] = True  # one ticket may be for many rounds

    @property
    def floor(self) -> int:
        """Fewest updates that may be released together."""
        return 1

    def parties(self) -> list[tuple[str, str]]:
        """Role and name of every process that this route adds to SuperLink, server and sites."""
        return []

    def middleware(self) -> list[str]:
        """The parties that sites submit to, in order."""
        return []

    def problems(self, federation: Federation) -> Iterator[str]:
        rule = federation.combine
        if rule.needs_rows and self.shows != "rows":
            yield f"combine.kind: {rule.kind} needs single updates, and route {self.kind} gives their sum; use fedavg"

    def recombinations(self, parameters: int) -> float | None:
        """log10 of the ways to put one update together again from what is released; None unless values are mixed."""
        return None

    @abstractmethod
    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        """The cost of one full round for one party of each kind."""

    @abstractmethod
    def site(self, seat: SiteSeat) -> SiteEnd:
        """This site's end."""

    @abstractmethod
    def server(self, seat: ServerSeat) -> ServerEnd:
        """The server's end."""


R = TypeVar("R", bound=Route)


def only(route: Route, kind: type[R], role: str) -> R:
    """The route as the one that has a role, for the process that plays it."""
    if not isinstance(route, kind):
        raise ConfigError(f"route.kind: {route.kind!r} has no {role}; use {kind.model_fields['kind'].default}")
    return route


def by_parameter(federation: Federation, who: str) -> Iterator[str]:
    """The problem of whoever moves or cuts updates by parameter, where what travels cannot be told apart so."""
    if not federation.coding.per_parameter:
        yield f"encode: {federation.coding.name} has no numbers of single parameters, which {who} needs; use none"


def tickets(federation: Federation) -> float:
    """Flower messages that a site costs the server per round: a ticket and its receipt, shared by a ticket's rounds."""
    return 2 / federation.rounds_per_ticket
