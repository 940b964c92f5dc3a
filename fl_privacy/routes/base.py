"""A route: how updates get from the sites to whoever combines them. Its ends: see `ends`.

Other code asks the route itself: site and server ask for their ends, launching and certificates for its parties, `plan`
for its cost, the config for its demands. No other code tests its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from pydantic import Field

from fl_privacy.choices import Choice, Model
from fl_privacy.coding import Payload
from fl_privacy.errors import ConfigError
from fl_privacy.reading import NAME
from fl_privacy.routes.ends import ServerEnd, ServerSeat, SiteEnd, SiteSeat
from fl_privacy.routes.parts import Parts, Whole
from fl_privacy.theory.cost import Cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.rns.residues import Residues
    from fl_privacy.steps.base import Foretold


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
