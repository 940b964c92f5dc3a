"""Real middleware processes over mutual TLS, mixes above all, with the real ends of sites and server, and no Flower."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.ops.metrics import OFF
from fl_privacy.rns.coding import Modular
from fl_privacy.round.sent import Sent
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat, SiteSeat, Ticket
from helpers import NONCE, Deployment, Keys, deploy
from server_app.asking import Asking
from sites import PARAMETERS, Work

Array = np.ndarray[Any, Any]
CHEATING = Path(__file__).with_name("cheating_mix.py")
CONFIG = """
name: test
sites: 4
rounds: 4
deadline: 20
evaluate: server
encode: {kind: ENCODE, r: 4, range: 2.0}
route: {kind: mixes, mixes: 3, trust: TRUST, n_min: 3}
"""


def federation(trust: str = "semi-honest", encode: str = "rns", mixes: str = "3") -> Federation:
    text = CONFIG.replace("TRUST", trust).replace("ENCODE", encode)
    return Federation.parse(text.replace("mixes: 3", f"mixes: {mixes}"))


class Threads:
    """Invitations without Flower: every site plays its ticket in a thread."""

    def __init__(self, chain: Chain) -> None:
        self._chain, self._running = chain, dict[str, threading.Thread]()

    def invite(self, ask: Ask, model: Any = None) -> None:
        for name in ask.cohort:
            if name not in self._running or not self._running[name].is_alive():
                thread = threading.Thread(target=self._chain.play_site, args=(name, ask.run), daemon=True)
                self._running[name] = thread
                thread.start()

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        return []


@dataclass
class Chain:
    """Mixes, sites and a server of one federation."""

    federation: Federation
    keys: Keys
    folder: Path
    mixes: list[Deployment]
    updates: Mapping[str, Array]
    errors: dict[str, Exception] = field(default_factory=dict)
    lies: Callable[[str, Any], None] = lambda name, end: None

    def __post_init__(self) -> None:
        self.addresses = [mix.address for mix in self.mixes]
        self.asking = Asking(self.federation, Work.layout, self.keys.of("server", "server"), "run", NONCE, self.folder)
        self.connect_server()

    def connect_server(self) -> None:
        server = self.keys.of("server", "server")
        self.end = self.federation.route.server(
            ServerSeat(self.federation, Work.layout, server, self.addresses, Threads(self))
        )

    def ask(self, round: int, number: int, model: Array) -> Ask:
        digest = self.end.digest("run", round - 1, model)
        return self.asking.make(round, self.federation.site_names, number, {}, digest)

    def play(self, round: int = 1, number: int = 1, seed: int = 0) -> Outcome:
        model = np.random.default_rng(seed).standard_normal(PARAMETERS).astype(np.float32)
        ask = self.ask(round, number, model)
        outcome = self.end.play(ask, model)
        self.end.confirm(ask)
        return outcome

    def play_site(self, name: str, run: str) -> None:
        state = self.folder / name
        state.mkdir(exist_ok=True)
        seat = SiteSeat(
            federation=self.federation,
            layout=Work.layout,
            keys=self.keys.of("site", name),
            middleware=self.addresses,
            site=name,
            tier="",
            floor=lambda: 3,
            sent=Sent(state),
            metrics=OFF,
            state=state,
        )
        end = self.federation.route.site(seat)
        self.lies(name, end)
        ticket = Ticket(run=run, federation=self.federation.digest, first=1, last=self.federation.rounds)
        try:
            for at, model in end.rounds(ticket, None):
                end.admit(at, model)
                try:
                    end.deliver(at, self._encoded(name, model))
                except Exception as error:
                    self.errors[name] = error
                    end.abstain(at)
        except Exception as error:
            self.errors[name] = error

    def _encoded(self, name: str, model: Array) -> Payload:
        coding = self.federation.coding
        if not isinstance(coding, Modular):
            return self.updates[name]
        return coding.encode(self.updates[name], coding.bound_at(model))[0]

    def expected(self) -> Array:
        """The mean of the updates as they are encoded."""
        coding: Any = self.federation.coding
        unit = coding.integers.unit(2.0)
        whole = np.sum([np.trunc(update / unit) for update in self.updates.values()], axis=0)
        return (whole * unit / len(self.updates)).astype(np.float32)


@contextmanager
def chain(folder: Path, made: Federation, cheats: Mapping[int, str] | None = None) -> Iterator[Chain]:
    """`cheats`: what which mix does to its sum."""
    keys, rng = Keys(folder / "pki"), np.random.default_rng(1)
    for site in made.site_names:
        keys.of("site", site)
    keys.of("server", "server")
    for role, name in made.route.parties():
        keys.of(role, name)
    mixes = [started(folder, keys, made, index, cheats or {}) for index in range(len(made.route.middleware()))]
    updates = {site: rng.uniform(-0.1, 0.1, PARAMETERS).astype(np.float32) for site in made.site_names}
    try:
        yield Chain(made, keys, folder, mixes, updates)
    finally:
        for mix in mixes:
            mix.stop()
        time.sleep(0)


def started(
    folder: Path, keys: Keys, made: Federation, index: int, cheats: Mapping[int, str], more: Sequence[str] = ()
) -> Deployment:
    options: Sequence[str] = ("--cheat", cheats[index]) if index in cheats else more
    script = CHEATING if index in cheats else None
    role = made.route.parties()[index][0]
    return deploy(folder / f"{role}-{index}", keys, made, role, index, options, script)
