"""The site's end of a route with middleware: fetch every round as it opens, upload a part to each middleware."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from fl_privacy.routes.ends import SiteSeat, Ticket
    from fl_privacy.routes.parts import Parts

GRACE = 10.0  # seconds that a round which can do without a middleware waits for it
POLL = 20.0  # seconds a fetch waits at the middleware before it asks again
CALL = 60.0  # seconds a call may take beyond the waiting
_AT = [field.name for field in fields(At)]
LONGEST = 11 * 3600.0  # seconds that a ticket lasts: Flower drops a reply after 12 hours; the server invites again


class Answer(NamedTuple):
    """What a middleware says about the next round, with its part of the model; of one that is `gone`, the last part."""

    header: pb.RoundHeader
    model: Vector | None
    gone: bool = False


class Member:
    """One site of a run, from its ticket's first round to its last."""

    stays = False  # after the last round of its ticket, until the run is over

    def __init__(self, seat: SiteSeat, parts: Parts, layers: Sequence[int] = (), tolerant: bool = False) -> None:
        """Tolerant: a round goes on without a middleware that is gone, and with the part of the model it last sent."""
        self._seat, self._federation, self._layout, self._tolerant = seat, seat.federation, seat.layout, tolerant
        self._last: dict[int, Answer] = {}
        self._metrics, self._parts, self._layers, self._keys = seat.metrics, parts, tuple(layers), seat.keys
        self._headers: list[pb.RoundHeader] = []
        self._first = pb.RoundHeader()  # of the open round, from a middleware that is there
        self._terms: Terms | None = None
        self._until = 0.0

    @cached_property
    def _stubs(self) -> list[rpc.Stub]:
        return [rpc.middleware(rpc.channel(address, self._keys, whom)) for address, whom in self._seat.peers]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Uploads run side by side: each middleware is another machine."""
        return ThreadPoolExecutor(len(self._stubs))

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        through_flower = "ticket: this federation's models do not travel through Flower"
        require(model is None, through_flower, "PERMISSION_DENIED")
        seen, end = pb.RoundHeader(round=ticket.first - 1), time.monotonic() + LONGEST
        while self.stays or seen.round < ticket.last:
            found = self._next(ticket.run, seen, end)
            if found is None:
                return
            self._headers, model = found
            seen = next(header for header in self._headers if header.round)
            self._first = seen
            if seen.round > ticket.last:
                return
            require(seen.run == ticket.run, "run: the middleware answered for another run")
            self._until = time.monotonic() + seen.deadline
            yield At(**{name: getattr(seen, name) for name in _AT}), model

    def admit(self, at: At, model: Vector) -> None:
        self._terms = self._checked(self._headers, model)

    def held(self) -> list[bytes]:
        return [header.held for header in self._headers]

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        assert self._terms is not None
        self._seat.sent.keep(self._terms, self._journals)
        parts = [payload] * len(self._stubs) if at.farewell else self._parts.at(at.round).split(payload)
        shares = [None] * len(parts) if counts is None else self._shares(at, counts)
        terms = self._said()
        with self._metrics.phase("uploading"):
            uploads = [
                self._pool.submit(client.patiently, partial(self._submit, stub, part, sent(share), terms), self._until)
                for stub, part, share, header in zip(self._stubs, parts, shares, self._headers, strict=True)
                if header.round
            ]
            failed = [error for upload in uploads if (error := upload.exception()) is not None]
        if failed and not (self._tolerant and len(failed) < len(uploads)):
            raise failed[0]

    def abstain(self, at: At) -> None:
        """Tell every middleware; if one does not hear it, its round waits for this site until the deadline."""
        for stub in self._stubs:
            with suppress(grpc.RpcError):
                stub.abstain(pb.AbstainRequest(**at.where), timeout=CALL)

    def _said(self) -> dict[str, Any]:
        """What the header of every part says of this site."""
        seat, head = self._seat, self._seat.head(self._first.run) or b""
        said: dict[str, Any] = {"tier": seat.tier, "floor": seat.floor(), "records": seat.records}
        return {**said, "head": head, "ledger": seat.ledger.statement()}

    def _submit(self, stub: rpc.Stub, part: Payload, counts: bytes, terms: dict[str, Any]) -> bool:
        left = max(1.0, self._until - time.monotonic())
        return client.submit(stub, self._first, part, left, self._federation.coding, counts=counts, **terms)

    @property
    def _receivers(self) -> int:
        """Parties that an update is split over."""
        return len(self._stubs)

    def _shares(self, at: At, counts: Counts) -> list[Counts]:
        """The counts, shared over the middleware; the same shares when the same counts of an attempt are sent again.

        A site that crashes between two aggregators would otherwise leave shares that do not belong together.
        """
        if self._receivers == 1:
            return [counts]
        secret, which = self._keys.key_file.read_bytes(), hashlib.sha256(sent(counts)).hexdigest()
        return split(counts, self._receivers, keys.derive(secret, at.run, at.round, at.attempt, f"shares {which}"))

    def reply(self) -> Payload | None:
        """No part of an update travels through Flower."""
        return None

    def _checked(self, headers: list[pb.RoundHeader], model: Vector) -> Terms:
        """The attempt's terms, if they are what this site and every middleware hold; otherwise nothing is sent."""
        first, seat = self._first, self._seat
        require(model.size == self._layout.size, "layout: the round's model is not that of this site's task")
        ours = first.farewell > 0 or self._layers in ((), tuple(first.layers))
        require(ours, "layers: not those of this site's model")
        terms = Terms.checked(first, **seat.facts(self._parts.digest(self._digests(headers))))
        terms.check(self._federation)
        floor = seat.floor()
        least = f"organisations: {terms.organisations} in the cohort, and this site wants {floor}"
        require(terms.organisations >= floor, least, "PERMISSION_DENIED")
        place = Place(first.salt, first.index, first.path)
        require(
            place.root(seat.site, terms.cohort) == terms.root, "cohort: this site is not in it", "PERMISSION_DENIED"
        )
        void = [self._signed(h, whom, terms.name) for h, (_, whom) in zip(headers, seat.peers, strict=True)]
        seat.sent.check(terms, frozenset.intersection(*void), self._journals)
        for header in headers:
            seat.ledger.check_witness(header.witness)
        return terms

    def _digests(self, headers: list[pb.RoundHeader]) -> list[bytes]:
        """Of the parts of the model, as they arrived."""
        return [header.digest for header in headers]

    def _signed(self, header: pb.RoundHeader, whom: Identity, attempt: str) -> frozenset[str]:
        """The attempts that a middleware says are void; its signature under this attempt must hold.

        One that is gone says nothing, and nothing is sent to it.
        """
        if not header.round:
            return frozenset()
        key = statements.checker(header.key, self._keys.roster().key_of(whom.role, whom.name), whom.name)
        good = statements.holds(key, statements.OPENED, attempt, header.journal, header.signature)
        require(good, f"signature: {whom.name} did not sign this attempt", "PERMISSION_DENIED")
        said = ((one.attempt, header.journal, one.signature) for one in header.void)
        return frozenset(one[0] for one in said if statements.holds(key, statements.VOID, *one))

    @property
    def _journals(self) -> list[str]:
        return [header.journal for header in self._headers]

    def _next(self, run: str, seen: pb.RoundHeader, end: float) -> tuple[list[pb.RoundHeader], Vector] | None:
        """The next round on which all middleware agrees, and its model; None when the run is over.

        A site outside a round's cohort waits for the next round; the middleware ends the wait if a run is abandoned.
        """
        while time.monotonic() < end:
            with self._metrics.phase("fetching"):
                answers = [self._fetch(index, run, seen) for index in range(len(self._stubs))]
            self._metrics.moved("in", sum(a.model.nbytes for a in answers if a.header.round and a.model is not None))
            here = [answer.header for answer in answers if not answer.gone]
            if any(header.finished for header in here):
                return None
            if here and all(header.round for header in here) and len({header.attempt for header in here}) == 1:
                models = [answer.model for answer in answers if answer.model is not None]
                require(len(models) == len(answers), "model: the middleware sent none", "DATA_LOSS")
                after = here[0].farewell or here[0].round - 1
                return [answer.header for answer in answers], self._parts.at(after + 1).join(models)
        return None

    def _fetch(self, index: int, run: str, seen: pb.RoundHeader) -> Answer:
        request = pb.FetchRequest(run=run, after_round=seen.round, after_attempt=seen.attempt, wait=POLL)
        # A middleware that was restarted does not know the run until the server opens its next round.
        until = time.monotonic() + (GRACE if self._tolerant else self._federation.deadline)
        call = partial(client.fetch, self._stubs[index], request, POLL + CALL)
        try:
            header, model = client.patiently(call, until, grpc.StatusCode.NOT_FOUND)
        except grpc.RpcError:
            if not self._tolerant or index not in self._last:
                raise
            return self._last[index]
        if self._tolerant and model is not None:
            self._last[index] = Answer(pb.RoundHeader(digest=header.digest), model, gone=True)
        return Answer(header, model)
