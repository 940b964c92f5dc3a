"""The site's end of a route with middleware: fetch every round as it opens, upload a part to each middleware."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import grpc

from fl_privacy.coding import Payload
from fl_privacy.errors import ProtocolError
from fl_privacy.steps.base import At
from fl_privacy.vector import Vector
from fl_privacy.wire import client, rpc
from fl_privacy.wire import federation_pb2 as pb

if TYPE_CHECKING:
    from fl_privacy.routes.base import SiteSeat, Ticket

POLL = 20.0  # seconds a fetch waits at the middleware before it asks again
CALL = 60.0  # seconds a call may take beyond the waiting
LONGEST = 11 * 3600.0  # seconds of a ticket: Flower drops an answer after 12 hours, and the server invites again


class Parts(Protocol):
    """How an update is divided over the middleware, and a model put together from it."""

    def split(self, payload: Payload) -> list[Payload]: ...

    def join(self, models: list[Vector]) -> Vector: ...


class Member:
    """One site of a run, from its ticket's first round to its last."""

    def __init__(self, seat: SiteSeat, parts: Parts, layers: Sequence[int] = ()) -> None:
        self._federation, self._layout, self._tier = seat.federation, seat.layout, seat.tier
        self._metrics, self._parts, self._layers = seat.metrics, parts, tuple(layers)
        self._stubs = [rpc.middleware(rpc.channel(address, seat.keys)) for address in seat.middleware]
        self._open = pb.RoundHeader()
        self._until = 0.0

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        if model is not None:
            raise ProtocolError("PERMISSION_DENIED", "ticket: this federation's models do not come through Flower")
        seen, end = pb.RoundHeader(round=ticket.first - 1), time.monotonic() + LONGEST
        while seen.round < ticket.last and (found := self._next(ticket.run, seen, end)) is not None:
            seen, model = found
            if seen.round > ticket.last:
                return
            self._check(seen, model)
            self._open, self._until = seen, time.monotonic() + seen.deadline
            yield At(seen.run, seen.round, seen.attempt), model

    def deliver(self, at: At, payload: Payload) -> None:
        with self._metrics.phase("uploading"):
            for stub, part in zip(self._stubs, self._parts.split(payload), strict=True):
                self._submit(stub, part)

    def reply(self) -> Payload | None:
        """Nothing of an update goes through Flower."""
        return None

    def _submit(self, stub: rpc.Stub, part: Payload) -> None:
        def send() -> bool:
            left = max(1.0, self._until - time.monotonic())
            return client.submit(
                stub, self._open, part, left, self._federation.coding, self._tier, self._federation.floor
            )

        client.patiently(send, self._until)

    def _check(self, header: pb.RoundHeader, model: Vector) -> None:
        if header.layout != self._layout.digest or model.size != self._layout.size:
            raise ProtocolError("INVALID_ARGUMENT", "layout: the round is of another model than this site's task")
        if self._layers and tuple(header.layers) != self._layers:
            raise ProtocolError("INVALID_ARGUMENT", "layers: not those of this site's model")

    def _next(self, run: str, seen: pb.RoundHeader, end: float) -> tuple[pb.RoundHeader, Vector] | None:
        """The next round that all of the middleware agrees on, and its model; None when the run is over.

        A site that is not in a cohort waits for the next one: the middleware ends the wait when a run is abandoned.
        """
        while time.monotonic() < end:
            with self._metrics.phase("fetching"):
                answers = [self._fetch(stub, run, seen) for stub in self._stubs]
            self._metrics.moved("in", sum(model.nbytes for _, model in answers if model is not None))
            if any(header.finished for header, _ in answers):
                return None
            if all(header.round for header, _ in answers) and len({h.attempt for h, _ in answers}) == 1:
                return answers[0][0], self._join([model for _, model in answers])
        return None

    def _fetch(self, stub: rpc.Stub, run: str, seen: pb.RoundHeader) -> tuple[pb.RoundHeader, Vector | None]:
        request = pb.FetchRequest(run=run, after_round=seen.round, after_attempt=seen.attempt, wait=POLL)
        # A middleware that was restarted does not know the run until the server opens its next round.
        until = time.monotonic() + self._federation.deadline
        return client.patiently(lambda: client.fetch(stub, request, POLL + CALL), until, grpc.StatusCode.NOT_FOUND)

    def _join(self, models: list[Vector | None]) -> Vector:
        whole = [model for model in models if model is not None]
        if len(whole) != len(models):
            raise ProtocolError("DATA_LOSS", "model: the middleware sent none")
        return self._parts.join(whole)
