"""Tickets to the sites through Flower: who holds one, who answered, who is lost and who came back."""

from __future__ import annotations

import time
from collections.abc import Callable

from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.routes.base import Ask, Ticket
from fl_privacy.vector import Vector

from .nodes import Nodes

LIFE = 11.5 * 3600.0  # seconds: Flower drops an answer after 12 hours
LOOK = 5.0  # seconds between two looks at who is there

Tell = Callable[..., None]


class Invitations:
    """One ticket for all rounds where the route and the engine allow it; the cohort is drawn per round all the same.

    A site that is not in a round's cohort waits at the middleware. One that joins late, ends its ticket early or comes
    back is invited on its own.
    """

    def __init__(self, nodes: Nodes, federation: Federation, rounds: int, tell: Tell) -> None:
        self._nodes, self._federation, self._rounds, self._tell = nodes, federation, rounds, tell
        self._held: dict[str, tuple[int, float]] = {}  # site -> last round of its ticket, and when that ends
        self._settled: set[str] = set()  # who declined the current attempt or is done with it: not asked twice
        self._attempt = ""
        self._looked = 0.0

    def invite(self, ask: Ask, model: Vector | None = None) -> None:
        """See to it that every site of the cohort holds a ticket for this round."""
        if ask.attempt != self._attempt:
            self._attempt, self._settled = ask.attempt, set()
        now = time.monotonic()
        holding = {site for site, (last, end) in self._held.items() if last >= ask.round and now < end}
        wanted = [site for site in ask.cohort if site not in holding | self._settled and self._nodes.knows(site)]
        if not wanted:
            return
        last = min(ask.round + self._rounds - 1, self._federation.rounds)
        ticket = Ticket(
            run=ask.run,
            federation=self._federation.digest,
            first=ask.round,
            last=last,
            attempt=ask.attempt if model is not None else "",
        )
        self._nodes.send(wanted, ticket.model_dump(), model)
        self._held |= dict.fromkeys(wanted, (last, now + LIFE))

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        """(site, status, update) of what came since the last call; sites that are back are invited again."""
        found = self._nodes.receipts(self._federation.coding)
        for site, status, _ in found:
            last, _ = self._held.pop(site, (0, 0.0))
            if status != "done" or last <= ask.round:  # else its ticket has only run out
                self._settled.add(site)
        if time.monotonic() > self._looked + LOOK and self._rounds > 1:
            self._looked = time.monotonic()
            self._look()
            self.invite(ask)
        return found

    def withdraw(self) -> None:
        """After a failed attempt: ask every site again, whatever became of its last ticket."""
        self._held.clear()

    def _look(self) -> None:
        """Notice who is gone: a ticket at a lost site is worth nothing."""
        for site in set(self._held) - set(self._nodes.refresh()):
            del self._held[site]
            self._tell("lost", site=site)
