"""A mix: it adds up what sites send it, and gives the server the sum."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fl_privacy.coding import MAX_PARAMETERS, Coding, Decoder, Payload
from fl_privacy.config import Federation
from fl_privacy.deploy.parties import index
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.mix import shares
from fl_privacy.mix.shares import Residues
from fl_privacy.ops.log import Log
from fl_privacy.rns import residues
from fl_privacy.rns.coding import Modular
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.counted import sent
from fl_privacy.round.machine import Phase
from fl_privacy.round.service import Middleware, Parts
from fl_privacy.round.terms import sized
from fl_privacy.routes.base import only
from fl_privacy.routes.mixes import SEED, SEED_BYTES, ByMixes
from fl_privacy.transcript.events import Event, Farewell, filed, rows_of
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import chunks

SUMMED = 8  # bytes of a residue of a sum, at most


class Whole(Decoder):
    """Refuses a share that could not be added up, when it arrives: afterwards it would fail the round of all."""

    def __init__(self, coding: Modular, columns: int) -> None:
        super().__init__(coding, columns)
        self._moduli = coding.moduli

    def check(self, site: str, row: Payload) -> None:
        residues.check_padding(row, self._moduli, self._parameters)


class Mix(Middleware):
    """It knows who sent what it adds up; unless it is the only one, that is noise without the other mixes' shares."""

    def __init__(
        self,
        name: str,
        federation: Federation,
        keys: Keyring,
        state: Path,
        log: Log,
        recorder: RunRecorder | None = None,
    ) -> None:
        super().__init__(federation, keys, state, log, recorder)
        self._name, self._index = name, index(name)
        self._route = only(federation.route, ByMixes, "mixes")  # type: ignore[type-abstract]

    def received(self, header: pb.RoundHeader) -> Coding:
        whole = header.farewell or self._has_data(header)
        return self.coding if whole else SEED

    def _has_data(self, header: pb.RoundHeader) -> bool:
        return self._route.data_mix(header.number, header.round) == self._index

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Vector:
        """The first mix of an attempt hands out the model, and the others know its digest."""
        chosen = self._route.taking_part(header.number, header.farewell)
        known = 1 <= header.parameters <= MAX_PARAMETERS
        require(known, f"parameters: {header.parameters} is out of range")
        require(self._index in chosen, f"number: {self._name} takes no part in this attempt")
        require(len(header.shards) == 1, f"shards: {len(header.shards)} digests of one model")
        whole = self._route.share_length(self.federation, header.parameters)
        length = 0 if header.farewell else whole if self._has_data(header) else SEED_BYTES
        require(header.length == length, f"length: {header.length} for {header.parameters} parameters")
        columns = self._route.columns(self.federation, header.parameters)
        fits = SUMMED * len(self._route.coding(self.federation).moduli) * columns <= psutil.virtual_memory().total
        require(fits, f"parameters: no memory for shares of {header.parameters}", "RESOURCE_EXHAUSTED")
        if self._index != chosen[0]:
            return np.empty(0, np.float32)
        return await self.take_model(state, header.parameters, header.shards[0], parts)

    def model_digest(self, header: pb.RoundHeader, model: Vector) -> bytes:
        return sized(header.shards[0], header.parameters)

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """The parts come again; if the attempt was released, only with the same ones."""
        if attempt.coding is not SEED:
            attempt.decoder = Whole(self._route.coding(self.federation), self._columns(attempt))

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """Whose parts are here; and once the round is settled, their sum, as often as the server asks."""
        if attempt.settling is not None:
            await asyncio.shield(attempt.settling)
        if attempt.result is not None:
            header, total = attempt.result
            with self.metrics.phase("releasing"):
                for part in chunks(pb.Chunk(release=header), [total]):
                    yield part
                    self.metrics.moved("out", part.nbytes if isinstance(part, memoryview) else 0)
            return
        members = attempt.round.accepted
        header = pb.ReleaseHeader(phase=Phase.CLOSED, count=len(members), members=attempt.cohort.bits(members))
        header.senders = attempt.cohort.bits(attempt.counted.sites)
        yield pb.Chunk(release=header)

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        """Add up what all mixes have; or the sum has arrived, or nobody wants it: the parts are forgotten."""
        attempt, state = self.asked(request, context), self._state(request.run)
        if not request.commit:
            return await self._forget(attempt, request.attempt)
        chosen, senders = (attempt.cohort.of_bits(bits) for bits in (request.members, request.senders))
        if attempt.applied is not None:
            require(attempt.applied == chosen, "members: this round was settled with others", "FAILED_PRECONDITION")
        elif attempt.settling is None:
            self._check_members(attempt, chosen, senders)
            attempt.round.release()
            attempt.settling = asyncio.create_task(self._settle(state, attempt, chosen, senders))
        if attempt.settling is not None:
            await asyncio.shield(attempt.settling)
        return attempt.reply

    async def _forget(self, attempt: Attempt, name: str) -> pb.SettleReply:
        if attempt.settling is not None:
            await asyncio.wait([attempt.settling])
        attempt.fail("the server gave it up")
        attempt.forget()
        attempt.applied = None
        await self.journalled(self.journal.confirm, name)
        return pb.SettleReply()

    def _check_members(self, attempt: Attempt, chosen: tuple[str, ...], senders: tuple[str, ...]) -> None:
        """Other mixes may add up another attempt for the same model: they must not have other sites' counts."""
        attempt.check_chosen(chosen, senders)
        alike = self._route.needed == self._route.mixes or attempt.round.spec.farewell or senders in ((), chosen)
        require(bool(alike), "senders: not those of the updates, and other mixes may release others")

    async def _settle(
        self, state: RunState, attempt: Attempt, clients: tuple[str, ...], senders: tuple[str, ...]
    ) -> None:
        """What leaves is in the journal before it leaves."""
        spec, round = attempt.round.spec, attempt.round
        try:
            facts = (spec.attempt, clients, attempt.cohort.bits(clients), round.digests(clients), senders)
            free = await self.journalled(self.journal.release, *facts)
            if free and round.may_release(senders):
                attempt.reply = pb.SettleReply(counts=sent(attempt.counted.total(senders)), counted=len(senders))
            header = pb.ReleaseHeader(phase=Phase.RELEASED, count=len(clients))
            header.members, header.senders = attempt.cohort.bits(clients), attempt.cohort.bits(senders)
            await asyncio.to_thread(self._record, attempt, clients)
            total: Payload | None = np.empty(0, np.uint32)
            if not spec.farewell:
                total = await self._output(attempt, clients, header)
            header.length = 0 if total is None else total.size
        except BaseException as error:
            round.revoke(str(error))
            attempt.forget()
            raise
        attempt.result, attempt.delivered, attempt.applied = None if total is None else (header, total), True, clients
        self.log("released", **spec.where, count=len(clients), floor=round.least)

    async def _output(self, attempt: Attempt, clients: Sequence[str], header: pb.ReleaseHeader) -> Payload | None:
        """What leaves of a settled round; None if it is not here yet."""
        with self.metrics.phase("adding"):
            total = await asyncio.to_thread(self._sum, attempt, clients, header)
        await self.vouch(attempt, clients, header, total)
        return total

    async def vouch(self, attempt: Attempt, clients: Sequence[str], header: pb.ReleaseHeader, total: Payload) -> None:
        """Sign the sum, where it is checked."""

    def _sum(self, attempt: Attempt, clients: Sequence[str], header: pb.ReleaseHeader) -> Payload:
        """The sum of these sites' shares as it travels; in the published form, of the only mix, not reduced."""
        coding = self._route.coding(self.federation)
        rows, columns = self._rows(attempt, clients), self._columns(attempt)
        if coding.form != "carry-safe":
            sums = coding.add(rows, attempt.parameters, reduced=False)
            return np.ascontiguousarray(sums, "<u8").view("<u4").reshape(-1)
        total = self._added(attempt, rows, columns)
        return coding.pack(total.astype(residues.width(coding.moduli, 1), copy=False))

    def _added(self, attempt: Attempt, rows: Sequence[Payload], columns: int) -> Residues:
        """Modulo each modulus."""
        coding = self._route.coding(self.federation)
        if attempt.coding is SEED:
            return shares.expanded([row.tobytes() for row in rows], coding.moduli, columns)
        return residues.add(rows, coding.moduli, columns, reduced=True)

    def _rows(self, attempt: Attempt, clients: Sequence[str]) -> list[Payload]:
        if attempt.rows is None:
            raise ProtocolError("FAILED_PRECONDITION", f"round {attempt.round.spec.round} is over")
        return [attempt.rows.take(client) for client in clients]

    def _columns(self, attempt: Attempt) -> int:
        return self._route.columns(self.federation, attempt.parameters)

    def _record(self, attempt: Attempt, clients: Sequence[str]) -> None:
        """What this party received, if it records its view: each part as it came."""
        arrays = attempt.counted.stored(clients)
        events: list[Event] = list(rows_of(clients))
        if attempt.round.spec.farewell:
            events.append(Farewell(round=attempt.round.spec.farewell))
        else:
            arrays["shares"] = np.stack(self._rows(attempt, clients))
        if self.recorder is not None and arrays:
            self.recorder.record(**filed(attempt.round.spec), arrays=arrays, events=events)
