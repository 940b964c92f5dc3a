"""Tickets to the sites through Flower: who holds one, who answered, who is lost and who came back."""

from __future__ import annotations

import time
from collections.abc import Callable

from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.round.terms import FAREWELLS
from fl_privacy.routes.ends import Ask, Ticket
from fl_privacy.vector import Vector

from .nodes import Nodes

LIFE = 11.5 * 3600.0  # seconds: Flower drops an answer after 12 hours
LOOK = 5.0  # seconds between two checks of who is connected

Report = Callable[..., None]


class Invitations:
    """One ticket for all rounds if route and engine allow it; the cohort is still drawn for every round.

    A site outside a round's cohort waits at the middleware. A site that joins late, ends its ticket early or comes back
    gets its own invitation.
    """

    def __init__(self, nodes: Nodes, federation: Federation, rounds: int, waits: bool, report: Report) -> None:
        """`waits`: whether a site can wait for a round; the last ticket then covers the farewell too."""
        self._nodes, self._federation, self._rounds, self._report = nodes, federation, rounds, report
        self._last = federation.rounds + (FAREWELLS if waits else 0)
        self._held: dict[str, tuple[int, float]] = {}  # site -> last round of its ticket, and when that ends
        self._settled: set[str] = set()  # sites that declined or finished the current attempt: not invited twice
        self._attempt = ""
        self._looked = 0.0

    def invite(self, ask: Ask, model: Vector | None = None, place: str = "") -> None:
        """Make sure that every site of the cohort holds a ticket for this round."""
        if ask.attempt != self._attempt:
            self._attempt, self._settled = ask.attempt, set()
        now = time.monotonic()
        holding = {site for site, (last, end) in self._held.items() if last >= ask.round and now < end}
        wanted = [site for site in ask.cohort if site not in holding | self._settled and self._nodes.knows(site)]
        if not wanted:
            return
        last = ask.round + self._rounds - 1
        if last >= self._federation.rounds:
            last = max(ask.round, self._last)
        terms = "" if model is None else ask.terms.to_json()
        names = {"run": ask.run, "federation": self._federation.digest}
        ticket = Ticket(**names, first=ask.round, last=last, terms=terms, place=place, made=ask.made)
        self._nodes.send(wanted, ticket.model_dump(), model)
        self._held |= dict.fromkeys(wanted, (last, now + LIFE))

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        """(site, status, update) of the replies since the last call; sites that came back are invited again."""
        found = self._nodes.receipts(self._federation.coding)
        for site, status, _ in found:
            last, _ = self._held.pop(site, (0, 0.0))
            if status != "done" or last <= ask.round:  # otherwise its ticket has only run out
                self._settled.add(site)
        if time.monotonic() > self._looked + LOOK and self._rounds > 1:
            self._looked = time.monotonic()
            self._look()
            self.invite(ask)
        return found

    def withdraw(self) -> None:
        """After a failed attempt: invite every site again, whatever happened to its last ticket."""
        self._held.clear()
        self._settled.clear()

    def _look(self) -> None:
        """Forget the tickets of sites that disconnected."""
        for site in set(self._held) - set(self._nodes.refresh()):
            del self._held[site]
            self._report("lost", site=site)
