"""The site's end of a route with middleware: fetch every round as it opens, upload a part to each middleware."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from fl_privacy.coding import Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import require
from fl_privacy.round import statements
from fl_privacy.round.cohort import Place
from fl_privacy.round.counted import sent
from fl_privacy.round.terms import Terms
from fl_privacy.scores.form import Counts
from fl_privacy.scores.shares import split
from fl_privacy.steps.base import At
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc

if TYPE_CHECKING:
    from fl_privacy.identity.keyring import Identity
    from fl_privacy.routes.base import SiteSeat, Ticket

POLL = 20.0  # seconds a fetch waits at the middleware before it asks again
CALL = 60.0  # seconds a call may take beyond the waiting
_AT = [field.name for field in fields(At)]
LONGEST = 11 * 3600.0  # seconds that a ticket lasts: Flower drops a reply after 12 hours; the server invites again


class Parts(Protocol):
    """How an update is split over the middleware, and how a model is joined from its parts."""

    def split(self, payload: Payload) -> list[Payload]: ...

    def join(self, models: list[Vector]) -> Vector: ...

    def digest(self, digests: list[bytes]) -> bytes: ...


class Member:
    """One site of a run, from its ticket's first round to its last."""

    def __init__(self, seat: SiteSeat, parts: Parts, layers: Sequence[int] = ()) -> None:
        self._seat, self._federation, self._layout = seat, seat.federation, seat.layout
        self._metrics, self._parts, self._layers, self._keys = seat.metrics, parts, tuple(layers), seat.keys
        self._headers: list[pb.RoundHeader] = []
        self._terms: Terms | None = None
        self._until = 0.0

    @cached_property
    def _stubs(self) -> list[rpc.Stub]:
        return [rpc.middleware(rpc.channel(address, self._keys, whom)) for address, whom in self._seat.peers]

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        through_flower = "ticket: this federation's models do not travel through Flower"
        require(model is None, through_flower, "PERMISSION_DENIED")
        seen, end = pb.RoundHeader(round=ticket.first - 1), time.monotonic() + LONGEST
        while seen.round < ticket.last and (found := self._next(ticket.run, seen, end)) is not None:
            self._headers, model = found
            seen = self._headers[0]
            if seen.round > ticket.last:
                return
            require(seen.run == ticket.run, "run: the middleware answered for another run")
            self._until = time.monotonic() + seen.deadline
            yield At(**{name: getattr(seen, name) for name in _AT}), model

    def admit(self, at: At, model: Vector) -> None:
        self._terms = self._checked(self._headers, model)

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        assert self._terms is not None
        self._seat.sent.keep(self._terms)
        parts = [payload] * len(self._stubs) if at.farewell else self._parts.split(payload)
        shares = [None] * len(parts) if counts is None else self._shares(at, counts)
        with self._metrics.phase("uploading"):
            for stub, part, share in zip(self._stubs, parts, shares, strict=True):
                client.patiently(partial(self._submit, stub, part, sent(share)), self._until)

    def abstain(self, at: At) -> None:
        """Tell every middleware; if one does not hear it, its round waits for this site until the deadline."""
        for stub in self._stubs:
            with suppress(grpc.RpcError):
                stub.abstain(pb.AbstainRequest(**at.where), timeout=CALL)

    def _submit(self, stub: rpc.Stub, part: Payload, counts: bytes) -> bool:
        left, config = max(1.0, self._until - time.monotonic()), self._federation
        head = self._seat.head(self._headers[0].run) or b""
        terms: dict[str, Any] = {"tier": self._seat.tier, "floor": self._seat.floor(), "counts": counts, "head": head}
        terms["ledger"] = self._seat.ledger.statement()
        return client.submit(stub, self._headers[0], part, left, config.coding, **terms)

    def _shares(self, at: At, counts: Counts) -> list[Counts]:
        """The counts, shared over the middleware; the same shares when the same counts of an attempt are sent again.

        A site that crashes between two aggregators would otherwise leave shares that do not belong together.
        """
        if len(self._stubs) == 1:
            return [counts]
        secret, which = self._keys.key_file.read_bytes(), hashlib.sha256(sent(counts)).hexdigest()
        return split(counts, len(self._stubs), keys.derive(secret, at.run, at.round, at.attempt, f"shares {which}"))

    def reply(self) -> Payload | None:
        """No part of an update travels through Flower."""
        return None

    def _checked(self, headers: list[pb.RoundHeader], model: Vector) -> Terms:
        """The attempt's terms, if they are what this site and every middleware hold; otherwise nothing is sent."""
        first, seat = headers[0], self._seat
        require(model.size == self._layout.size, "layout: the round's model is not that of this site's task")
        ours = first.farewell > 0 or self._layers in ((), tuple(first.layers))
        require(ours, "layers: not those of this site's model")
        terms = Terms.checked(first, **seat.facts(self._parts.digest([h.digest for h in headers])))
        terms.check(self._federation)
        floor = seat.floor()
        least = f"organisations: {terms.organisations} in the cohort, and this site wants {floor}"
        require(terms.organisations >= floor, least, "PERMISSION_DENIED")
        place = Place(first.salt, first.index, first.path)
        require(
            place.root(seat.site, terms.cohort) == terms.root, "cohort: this site is not in it", "PERMISSION_DENIED"
        )
        void = [self._signed(h, whom, terms.name) for h, (_, whom) in zip(headers, seat.peers, strict=True)]
        seat.sent.check(terms, frozenset.intersection(*void))
        for header in headers:
            seat.ledger.check_witness(header.witness)
        return terms

    def _signed(self, header: pb.RoundHeader, whom: Identity, attempt: str) -> frozenset[str]:
        """The attempts that a middleware says are void; its signature under this attempt must hold."""
        key = statements.checker(header.key, self._keys.roster().key_of(whom.role, whom.name), whom.name)
        good = statements.holds(key, statements.OPENED, attempt, header.signature)
        require(good, f"signature: {whom.name} did not sign this attempt", "PERMISSION_DENIED")
        return frozenset(one.attempt for one in header.void if statements.holds(key, statements.VOID, *_said(one)))

    def _next(self, run: str, seen: pb.RoundHeader, end: float) -> tuple[list[pb.RoundHeader], Vector] | None:
        """The next round on which all middleware agrees, and its model; None when the run is over.

        A site outside a round's cohort waits for the next round; the middleware ends the wait if a run is abandoned.
        """
        while time.monotonic() < end:
            with self._metrics.phase("fetching"):
                answers = [self._fetch(stub, run, seen) for stub in self._stubs]
            self._metrics.moved("in", sum(model.nbytes for _, model in answers if model is not None))
            if any(header.finished for header, _ in answers):
                return None
            if all(header.round for header, _ in answers) and len({h.attempt for h, _ in answers}) == 1:
                models = [model for _, model in answers if model is not None]
                require(len(models) == len(answers), "model: the middleware sent none", "DATA_LOSS")
                return [header for header, _ in answers], self._parts.join(models)
        return None

    def _fetch(self, stub: rpc.Stub, run: str, seen: pb.RoundHeader) -> tuple[pb.RoundHeader, Vector | None]:
        request = pb.FetchRequest(run=run, after_round=seen.round, after_attempt=seen.attempt, wait=POLL)
        # A middleware that was restarted does not know the run until the server opens its next round.
        until = time.monotonic() + self._federation.deadline
        return client.patiently(lambda: client.fetch(stub, request, POLL + CALL), until, grpc.StatusCode.NOT_FOUND)


def _said(one: pb.Statement) -> tuple[str, bytes]:
    return one.attempt, one.signature
