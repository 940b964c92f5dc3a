"""A site's end of route `mixes`: it splits its encoded update into shares, one per mix, and answers for them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from fl_privacy.coding import Coding, Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.mix import check, shares
from fl_privacy.mix.shares import Residues
from fl_privacy.rns.residues import unpack, width
from fl_privacy.round.board import gathered
from fl_privacy.round.counted import sent
from fl_privacy.round.member import CALL, POLL, Member
from fl_privacy.round.terms import sized
from fl_privacy.routes.mixes import SEED
from fl_privacy.routes.parts import Whole
from fl_privacy.scores.form import Counts
from fl_privacy.scores.shares import split
from fl_privacy.steps.base import At
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc

if TYPE_CHECKING:
    from fl_privacy.routes.ends import SiteSeat
    from fl_privacy.routes.mixes import ByMixes

TURN = 1.0  # seconds that a fetch waits at a mix if the round may open without it


class FromOne(Whole):
    """The whole model comes from one of the mixes, and the others know its digest and its size."""

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters

    def digest(self, digests: list[bytes]) -> bytes:
        return sized(digests[0], self._parameters)


@dataclass(frozen=True)
class Part:
    """What one mix gets, as it travels."""

    payload: Payload
    coding: Coding

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.payload).view(np.uint8).data).digest()


class Sharing(Member):
    """One site of a run."""

    def __init__(self, route: ByMixes, seat: SiteSeat) -> None:
        super().__init__(seat, FromOne(seat.layout.size))
        self._route, self._coding = route, seat.federation.coding
        self._chosen: tuple[int, ...] = ()

    @property
    def _receivers(self) -> int:
        return len(self._chosen)

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        assert self._terms is not None
        self._seat.sent.keep(self._terms, self._journals)
        parts = self._parts_of(at, payload)
        counted = [None] * len(parts) if counts is None else self._shares(at, counts)
        said = self._said()
        papers = self._papers(at, parts)
        terms = [{**said, **paper, "counts": sent(count)} for paper, count in zip(papers, counted, strict=True)]
        self._send(parts, terms)
        self._answer(at, parts, terms)

    def _send(self, parts: Sequence[Part], terms: Sequence[Mapping[str, Any]], *also: grpc.StatusCode) -> None:
        """Every mix its part, side by side; a mix that has it already says so."""
        with self._metrics.phase("uploading"):
            uploads = [
                self._pool.submit(
                    client.patiently, partial(self._upload, self._stubs[index], part, one), self._until, *also
                )
                for index, part, one in zip(self._chosen, parts, terms, strict=True)
            ]
            failed = [error for upload in uploads if (error := upload.exception()) is not None]
        if failed:
            raise failed[0]

    def _papers(self, at: At, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """What the site signs about its parts: nothing, unless the sums are checked."""
        return [{} for _ in parts]

    def _answer(self, at: At, parts: Sequence[Part], terms: Sequence[Mapping[str, Any]]) -> None:
        """Take part in the check of the sums, if there is one."""

    def _read(self, at: At, stage: str, *own: bytes) -> list[bytes]:
        """Say something at the mix where all read it, and read what all have said."""
        until = self._until + self._federation.deadline
        return gathered(lambda known: self._page(at, stage, own, known, until), until)

    def _page(self, at: At, stage: str, own: Sequence[bytes], known: int, until: float) -> tuple[Sequence[bytes], bool]:
        stub = self._stubs[self._chosen[0]]
        while time.monotonic() < until:
            request = pb.CheckRequest(**at.where, stage=stage, said=own, wait=POLL, after=known)
            reply = client.patiently(partial(stub.check, request, timeout=POLL + CALL), until)
            if reply.said or reply.complete:
                return reply.said, reply.complete
        raise ProtocolError("DEADLINE_EXCEEDED", "check: the others did not answer in time")

    def _upload(self, stub: rpc.Stub, part: Part, terms: Mapping[str, Any]) -> bool:
        left = max(1.0, self._until - time.monotonic())
        return client.submit(stub, self._first, part.payload, left, part.coding, **terms)

    def _parts_of(self, at: At, payload: Payload) -> list[Part]:
        """One part per mix of this attempt: seeds, and one share as data; the same ones if they are sent again."""
        assert self._terms is not None
        if at.farewell:
            return [Part(payload, self._coding)] * len(self._chosen)
        if len(self._chosen) == 1:
            return [Part(payload, self._coding)]
        coding, size = self._route.coding(self._federation), self._layout.size
        values, secret = coding.unpack(payload, size), self._secret(at, payload)
        if self._route.masks:
            values = check.masked(values, coding.moduli, keys.derive(secret, "", 0, "", "masks"), self._route.masks)
        seeds, data = shares.split(values, coding.moduli, len(self._chosen), keys.derive(secret, "", 0, "", "shares"))
        waiting, carrier = iter(seeds), self._route.data_mix(self._terms.number, at.round)
        whole = Part(coding.pack(data.astype(width(coding.moduli, 1), copy=False)), self._coding)
        return [whole if index == carrier else Part(_bytes(next(waiting)), SEED) for index in self._chosen]

    def _secret(self, at: At, payload: Payload) -> bytes:
        """Bound to the attempt and the update: other values are never split with the same noise."""
        own, which = self._keys.key_file.read_bytes(), hashlib.sha256(payload.data).hexdigest()
        return keys.derive(own, at.run, at.round, at.attempt, f"mixes {which}")

    def _shares(self, at: At, counts: Counts) -> list[Counts]:
        if self._receivers == 1:
            return [counts]
        which = f"shares {hashlib.sha256(sent(counts)).hexdigest()}"
        return split(
            counts, self._receivers, keys.derive(self._keys.key_file.read_bytes(), at.run, at.round, at.attempt, which)
        )

    def abstain(self, at: At) -> None:
        for index in self._chosen or range(len(self._stubs)):
            with suppress(grpc.RpcError):
                self._stubs[index].abstain(pb.AbstainRequest(**at.where), timeout=CALL)

    # The next round, from the mixes that take part in it

    def _digests(self, headers: list[pb.RoundHeader]) -> list[bytes]:
        return [headers[self._chosen[0]].digest]

    def _next(self, run: str, seen: pb.RoundHeader, end: float) -> tuple[list[pb.RoundHeader], Vector] | None:
        """The next round: one mix says which it is, and with it who takes part; all of these must agree."""
        while time.monotonic() < end:
            with self._metrics.phase("fetching"):
                found = self._ask(run, seen)
            if found is None:
                continue
            first, headers, model = found
            if first.finished:
                return None
            if len({headers[index].attempt for index in self._chosen}) == 1 and model is not None:
                self._metrics.moved("in", model.nbytes)
                return headers, model
        return None

    def _ask(self, run: str, seen: pb.RoundHeader) -> tuple[pb.RoundHeader, list[pb.RoundHeader], Vector | None] | None:
        word = self._first_word(run, seen)
        if word is None:
            return None
        index, first, model = word
        if first.finished:
            return first, [], None
        chosen, answers = self._of_attempt(first), {index: (first, model)}
        answers |= {other: self._of(other, run, seen, POLL) for other in chosen if other != index}
        answers = {other: answers[other] for other in chosen}
        if not all(header.round for header, _ in answers.values()):
            finished = next((header for header, _ in answers.values() if header.finished), None)
            return None if finished is None else (finished, [], None)
        if any(self._of_attempt(header) != chosen for header, _ in answers.values()):
            return None
        self._chosen = chosen
        headers = [answers[index][0] if index in answers else pb.RoundHeader() for index in range(len(self._stubs))]
        return first, headers, answers[chosen[0]][1]

    def _of_attempt(self, header: pb.RoundHeader) -> tuple[int, ...]:
        return self._route.taking_part(header.number, header.farewell)

    def _first_word(self, run: str, seen: pb.RoundHeader) -> tuple[int, pb.RoundHeader, Vector | None] | None:
        """Which mix says that a round is open, and what it says: any, if the round may do without some."""
        alone = self._route.needed == self._route.mixes
        for index in range(1 if alone else len(self._stubs)):
            try:
                header, model = self._of(index, run, seen, POLL if alone else TURN, patient=alone)
            except grpc.RpcError:
                if alone:
                    raise
                continue
            if header.round or header.finished:
                return index, header, model
        return None

    def _of(
        self, index: int, run: str, seen: pb.RoundHeader, wait: float, patient: bool = True
    ) -> tuple[pb.RoundHeader, Vector | None]:
        request = pb.FetchRequest(run=run, after_round=seen.round, after_attempt=seen.attempt, wait=wait)
        call = partial(client.fetch, self._stubs[index], request, wait + CALL)
        if not patient:
            return call()
        return client.patiently(call, time.monotonic() + self._federation.deadline, grpc.StatusCode.NOT_FOUND)


def _bytes(seed: bytes) -> Payload:
    return np.frombuffer(seed, np.uint8)


def share_of(part: bytes, coding: Any, columns: int, seeded: bool) -> Residues:
    """The share that a part stands for."""
    if seeded:
        require(len(part) == keys.KEY_BYTES, f"seed: {len(part)} bytes, {keys.KEY_BYTES} are needed")
        return shares.expanded([part], coding.moduli, columns)
    require(len(part) % 4 == 0, "share: no whole number of words")
    return unpack(np.frombuffer(part, "<u4"), coding.moduli, columns)
