"""Routes without a server, in simulation only: every site has a model of its own and sends parts of it to others.

The server's process stands for the network. It gives every site its own model, takes the update that the site trained,
plays the exchange between the sites, and under `audit: true` records what each of them received. Only the simulation
engine runs this: in a deployment, no process may see all of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.combine.rules import FedAvg
from fl_privacy.peers.exchange import Arrays, Exchange, Matrix, Message
from fl_privacy.roles import PEER
from fl_privacy.round.terms import joined
from fl_privacy.routes.base import UPDATES, Route, Trust
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat, SiteSeat
from fl_privacy.routes.server import AtServer, AtSite
from fl_privacy.steps.base import single_use_key
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.theory.distribution import distribution_time
from fl_privacy.vector import Layout, Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

MODEL = "model"  # what all sites start from


@dataclass(frozen=True)
class Moment:
    """One exchange, before it: sites are rows, in the order of `names`."""

    federation: Federation
    layout: Layout
    ask: Ask
    names: Sequence[str]
    models: Matrix  # that the sites started from
    updates: Matrix  # that they trained, after the steps
    kept: Arrays

    def key(self, peer: int, purpose: str) -> bytes:
        """A single-use key of one site."""
        return single_use_key(self.federation, self.ask, self.names[peer], purpose)


class PeersRoute(Route):
    """What these baselines have in common."""

    long_tickets: ClassVar[bool] = False  # the model comes with the ticket
    simulated: ClassVar[bool] = True
    shows_senders: ClassVar[bool] = True  # a site knows from whom a message comes
    sends_models: ClassVar[bool] = True
    learns: ClassVar[str]  # what one site learns of others

    @abstractmethod
    def exchange(self, at: Moment) -> Exchange:
        """What the sites send each other, and their models after it."""

    @abstractmethod
    def volume(self, federation: Federation, parameters: int) -> tuple[int, int, int]:
        """Messages and parameters that a site sends in a round, and how many of one other site's it gets to see."""

    def observers(self, federation: Federation) -> list[str]:
        return [PEER + name for name in federation.site_names]

    def trust(self, federation: Federation) -> list[Trust]:
        return [Trust(parties=("server",), learn=UPDATES), Trust(parties=("site",), learn=self.learns)]

    def problems(self, federation: Federation) -> Iterator[str]:
        sites = len(federation.sites)
        if federation.hosts is not None:
            yield f"hosts: route {self.kind} runs on the simulation engine only; remove hosts, or use shards"
        if federation.cohort < sites or federation.quorum < sites:
            yield f"cohort: on route {self.kind}, all {sites} sites take part in every round; remove cohort and quorum"
        if sites < 2:
            yield f"sites: route {self.kind} needs at least 2"
        if federation.combine != FedAvg():
            yield f"combine.kind: on route {self.kind} sites combine themselves; remove combine"
        if federation.coding != FLOAT32:
            yield f"encode: route {self.kind} sends parts of float32 models, not {federation.coding.name}; use none"

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        messages, sent, seen = self.volume(federation, parameters)
        made = cost(self.coding(), "site", len(federation.sites), 2 * messages, models=(0, 0), updates=(sent, sent))
        return [replace(made, observed=seen * federation.cohort)]

    def coding(self) -> Coding:
        """How the parameters of a message would travel."""
        return FLOAT32

    def published(self, federation: Federation, size: int, rate: float) -> float | None:
        return distribution_time(self.kind, size, len(federation.sites), rate, **self.setting(federation))

    def setting(self, federation: Federation) -> dict[str, Any]:
        """What the paper's formula for the time of a round takes."""
        return {}

    def site(self, seat: SiteSeat) -> AtPeer:
        return AtPeer(seat)

    def server(self, seat: ServerSeat) -> Network:
        return Network(self, seat)


class AtPeer(AtSite):
    """As on route `server`, with a model of the site's own: the terms of an attempt stand for all sites' models."""

    def _digest(self, model: Vector) -> bytes:
        return self._terms.model


class Network(AtServer):
    """Everything between the sites."""

    def __init__(self, route: PeersRoute, seat: ServerSeat) -> None:
        super().__init__(seat)
        self._route, self._seat, self._names = route, seat, sorted(seat.federation.site_names)

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        from fl_privacy.wire.stream import digest

        return joined([digest(own) for own in self._models()])

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.transcript.events import Row  # reading a config does not need the transcript

        came = super().play(ask, model)
        assert came.rows is not None
        updates = self._federation.coding.decode(came.rows, self._size)  # in the order of their names, and of all
        before = np.stack(self._models())
        at = Moment(self._federation, self._seat.layout, ask, self._names, before, updates, self._seat.held().kept)
        found = self._route.exchange(at)
        if self._federation.audit:
            self._record(ask, before, found.messages)
        return Outcome(
            came.count,
            receipts=[event for event in came.receipts if not isinstance(event, Row)],
            received=came.received,
            models={PEER + name: model for name, model in zip(self._names, found.models, strict=True)},
            kept=dict(found.kept),
        )

    def copies(self, ask: Ask) -> int:
        return 0

    def _models(self) -> list[Vector]:
        """Every site's own model; before the first round, all have the same."""
        held = self._seat.held().models
        return [held[PEER + name] if PEER + name in held else held[MODEL] for name in self._names]

    def _invite(self, ask: Ask, model: Vector | None) -> None:
        for name, own in zip(self._names, self._models(), strict=True):
            self._sites.invite(replace(ask, cohort=[name]), own)

    def _record(self, ask: Ask, before: Matrix, messages: Sequence[Message]) -> None:
        """What every site received, and the model that it started from."""
        from fl_privacy.transcript.events import filed, rows_of
        from fl_privacy.transcript.recorder import RunRecorder

        assert self._seat.views is not None
        for peer, name in enumerate(self._names):
            mine = [message for message in messages if message.recipient == peer]
            senders = [self._names[message.sender] for message in mine] if self._route.shows_senders else []
            recorder = RunRecorder(self._seat.views / (PEER + name), PEER + name, self._seat.keys)
            recorder.record(**filed(ask), arrays=_arrays(before[peer], mine), events=rows_of(senders))


def _arrays(own: Vector, messages: Sequence[Message]) -> dict[str, Payload]:
    """As a view has it: the values of all messages in a row, their coordinates unless all are whole, their sizes."""
    found: dict[str, Payload] = {"model": own}
    if messages:
        found["values"] = np.concatenate([message.values for message in messages])
        found["sizes"] = np.array([len(message.values) for message in messages])
    where = [message.where for message in messages if message.where is not None]
    return found | ({"where": np.concatenate(where)} if where else {})
