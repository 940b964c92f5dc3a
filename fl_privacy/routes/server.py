"""`route: {kind: server}`: the baseline, in which updates go through Flower."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.errors import ProtocolError, RoundFailed, require
from fl_privacy.routes.base import Ask, Outcome, Route, ServerSeat, SiteSeat, Ticket, Trust
from fl_privacy.steps.base import At
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

POLL = 0.1


class ServerRoute(Route):
    """The baseline: updates travel through Flower, and the server sees who sent what."""

    kind: Literal["server"] = "server"
    long_tickets: ClassVar[bool] = False  # the model comes with the ticket

    def trust(self) -> list[Trust]:
        return [Trust(parties=(name,)) for name in ("server", "superlink")]

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, coding = federation.cohort, parameters, federation.coding
        return [
            cost(coding, "server", 1, 2 * n, models=(0, n * d), updates=(n * d, 0)),
            cost(coding, "site", n, 2, models=(d, 0), updates=(0, d)),
        ]

    def site(self, seat: SiteSeat) -> AtSite:
        return AtSite(seat)

    def server(self, seat: ServerSeat) -> AtServer:
        return AtServer(seat)


class AtSite:
    """The model comes with the ticket, and the update goes back with the receipt."""

    def __init__(self, seat: SiteSeat) -> None:
        self._size = seat.layout.size
        self._update: Payload | None = None

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        self._update = None
        if model is None or not ticket.attempt:
            raise ProtocolError("INVALID_ARGUMENT", "ticket: came without a model or an attempt")
        sound = model.shape == (self._size,) and bool(np.isfinite(model).all())
        require(sound, "model: not of this federation's layout, or not finite")
        yield At(ticket.run, ticket.first, ticket.attempt), model

    def deliver(self, at: At, payload: Payload) -> None:
        self._update = payload

    def reply(self) -> Payload | None:
        return self._update


class AtServer:
    """Updates come back in Flower's replies, and the server sees whose each is."""

    def __init__(self, seat: ServerSeat) -> None:
        self._federation, self._sites, self._size = seat.federation, seat.sites, seat.layout.size

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.transcript.events import (  # reading a config does not need the transcript
            Event,
            Receipt,
            rows_of,
        )

        self._sites.invite(ask, model)
        until, failed = time.monotonic() + self._federation.deadline, 0
        updates, receipts = dict[str, Payload](), list[Event]()
        while len(updates) + failed < len(ask.cohort) and time.monotonic() < until:
            for site, status, update in self._sites.answers(ask):
                receipts.append(Receipt(name=site, status=status, time=time.time()))
                if update is not None and self._is_sound(update):
                    updates[site] = update
                else:
                    failed += 1
            time.sleep(POLL)
        if len(updates) < self._federation.quorum:
            raise RoundFailed(f"{len(updates)} of {len(ask.cohort)} updates came, {self._federation.quorum} are needed")
        names = sorted(updates)
        matrix, tiers = np.stack([updates[n] for n in names]), [self._federation.site(n).tier for n in names]
        return Outcome(len(names), matrix, tiers, [*receipts, *rows_of(names)], matrix.nbytes)

    def _is_sound(self, update: Payload) -> bool:
        coding = self._federation.coding
        try:
            coding.check(update)
        except ProtocolError:
            return False
        return update.dtype == coding.type and update.shape == (coding.length(self._size),)

    def copies(self, ask: Ask) -> int:
        return len(ask.cohort)

    def finish(self, run: str) -> None:
        """No other party takes part in a run."""
