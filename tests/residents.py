"""For tests: sites that aggregate, in threads of this process, by a real mailbox process. They train nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fl_privacy.combine.rules import Combiner
from fl_privacy.config import Federation
from fl_privacy.errors import ProtocolError
from fl_privacy.ops.metrics import OFF
from fl_privacy.round.resident import Resident
from fl_privacy.round.sent import Sent
from fl_privacy.routes.ends import Outcome, ServerSeat, SiteSeat, Ticket
from fl_privacy.routes.shards import ShardsRoute
from fl_privacy.steps.base import At
from fl_privacy.vector import Entry, Layout
from helpers import NONCE, Array, Deployment, Keys
from server_app.asking import Asking
from sites import Events

D = 41
LAYOUT = Layout((Entry("w", (D,)),))


def federation(sites: int = 4, aggregators: int = 4, **changes: Any) -> Federation:
    route = {"kind": "shards", "placement": "sites", "aggregators": aggregators, **changes.pop("route", {})}
    fields = {"name": "test", "sites": sites, "rounds": 50, "quorum": 3, "deadline": 20.0, "reproducible": True}
    return Federation.model_validate({**fields, "evaluate": "sites", "route": route, **changes})


def initial() -> Array:
    return np.random.default_rng(5).normal(size=D).astype(np.float32)


def update_of(site: str, round: int) -> Array:
    return np.random.default_rng([round, *site.encode()]).normal(size=D).astype(np.float32)


class Uninvited:
    """Sites come by themselves."""

    def invite(self, ask: Any, model: Any = None) -> None: ...

    def answers(self, ask: Any) -> list[Any]:
        return []


@dataclass
class Guest:
    """A site: `kind` is how it behaves; it sends `update_of` itself, or abstains where `sends` says so."""

    federation: Federation
    keys: Keys
    address: str
    name: str
    state: Path
    kind: type[Resident] = Resident
    sends: Callable[[At], bool] = lambda at: True
    log: Events = field(default_factory=Events)
    models: dict[int, Array] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def end(self) -> Resident:
        self.state.mkdir(parents=True, exist_ok=True)
        route = self.federation.route
        assert isinstance(route, ShardsRoute)
        seat = SiteSeat(
            federation=self.federation,
            layout=LAYOUT,
            keys=self.keys.of("site", self.name),
            middleware=[self.address],
            site=self.name,
            tier="",
            floor=lambda: 2,
            sent=Sent(self.state),
            metrics=OFF,
            state=self.state,
            initial=initial,
            log=self.log,
        )
        cuts = route.cut(self.federation, D), route.parts(self.federation, D)
        return self.kind(seat, *cuts, route.aggregating(self.federation))

    def stay(self, run: str) -> None:
        ticket = Ticket(run=run, federation=self.federation.digest, first=1, last=self.federation.rounds)
        end = self.end()
        try:
            for at, model in end.rounds(ticket, None):
                try:
                    end.admit(at, model)
                    self.models[at.round] = model.copy()
                    if not self.sends(at):
                        end.abstain(at)
                        continue
                    counts = np.arange(at.counts, dtype=np.uint64) if at.counts else None
                    payload = np.empty(0, np.float32) if at.farewell else update_of(self.name, at.round)
                    end.deliver(at, payload, counts)
                except (ProtocolError, grpc.RpcError) as error:
                    self.problems.append(str(error) if isinstance(error, ProtocolError) else str(error.details()))
                    end.abstain(at)
        except Exception as error:
            self.problems.append(f"left: {error}")


class House:
    """A mailbox, its sites and the server's end of one run."""

    def __init__(self, mailbox: Deployment, folder: Path, run: str, kinds: Mapping[str, type[Resident]]) -> None:
        self.mailbox, self.run, self.federation, self._folder = mailbox, run, mailbox.federation, folder
        names = self.federation.site_names
        at = (self.federation, mailbox.keys, mailbox.address)
        self.guests = {name: Guest(*at, name, folder / name, kinds.get(name, Resident)) for name in names}
        server = mailbox.keys.of("server", "server")
        seat = ServerSeat(self.federation, LAYOUT, server, [mailbox.address], Uninvited(), initial=initial)
        self.server = self.federation.route.server(seat)
        self._asking = Asking(self.federation, LAYOUT, server, run, NONCE, folder)
        self._threads: list[threading.Thread] = []

    def enter(self, *names: str) -> None:
        """These sites take part from now on; all without a name."""
        for name in names or self.federation.site_names:
            thread = threading.Thread(target=self.guests[name].stay, args=(self.run,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def play(self, round: int, number: int = 1, **wanted: int) -> Outcome:
        model = self.server.digest(self.run, wanted.get("farewell", 0) or round - 1, None)
        ask = self._asking.make(round, list(self.federation.site_names), number, wanted, model)
        return self.server.play(ask, None)

    def leave(self) -> None:
        self.server.finish(self.run)
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)

    def model(self, round: int) -> Array:
        """The model that a round starts from, the same at every site that took part."""
        found = [guest.models[round] for guest in self.guests.values() if round in guest.models]
        assert found
        assert all(np.array_equal(one, found[0]) for one in found)
        return found[0]


def averaged(model: Array, sites: Sequence[str], round: int, config: Federation) -> Array:
    """What the federation's rule makes of these sites' updates, all in one place."""
    return Combiner(config).step(model, np.stack([update_of(site, round) for site in sorted(sites)]))
