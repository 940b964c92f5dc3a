"""The shuffler: accepts updates from known sites and gives the server a mixture of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.counted import sent
from fl_privacy.round.rows import Rows
from fl_privacy.round.service import Middleware, Parts
from fl_privacy.routes.base import only
from fl_privacy.routes.shuffler import Group, ShufflerRoute
from fl_privacy.shuffle.job import Job, MixingSet, TopUp
from fl_privacy.transcript.events import Event, Farewell, Mixing, filed, rows_of
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.buffers import give_back, keep_buffers
from fl_privacy.wire.stream import chunks

from .mixer import mix_apart
from .secrets import MixingKeys


class Shuffler(Middleware):
    """Parameter, layer or model shuffling; the key is fresh for every attempt and forgotten with it."""

    def __init__(
        self, federation: Federation, keys: Keyring, state: Path, log: Log, recorder: RunRecorder | None = None
    ) -> None:
        super().__init__(federation, keys, state, log, recorder)
        self._route = only(federation.route, ShufflerRoute, "shuffler")
        self._secrets = MixingKeys(state, keys.key_file.read_bytes())

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Vector:
        keep_buffers()  # until the next `give_back`
        fits = header.length == (0 if header.farewell else self.coding.length(header.parameters))
        require(fits, f"length: {header.length} for {header.parameters} parameters")
        return await self.take_model(state, header.parameters, header.model, parts)

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """The updates come again, and the same key mixes them."""

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """The same bytes whenever the server asks, until it says that they are on its disk."""
        if attempt.settling is None:
            attempt.round.release()
            attempt.settling = asyncio.create_task(self._release(state, attempt))
        await asyncio.shield(attempt.settling)
        if attempt.result is None:
            raise ProtocolError("FAILED_PRECONDITION", f"round: {attempt.round.spec.round} was released and is gone")
        header, matrix = attempt.result
        with self.metrics.phase("releasing"):
            for part in chunks(pb.Chunk(release=header), matrix):
                yield part
                self.metrics.moved("out", part.nbytes if isinstance(part, memoryview) else 0)

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        """The release has arrived, or nobody wants it: the updates and their key are forgotten."""
        attempt = self.asked(request, context)
        if attempt.settling is not None:
            await asyncio.wait([attempt.settling])
        attempt.fail("the server gave it up")
        attempt.forget()
        await self.journalled(self.journal.confirm, request.attempt)
        self._secrets.forget(request.attempt)
        return pb.SettleReply()

    async def _release(self, state: RunState, attempt: Attempt) -> None:
        """Mix the rows; what leaves is in the journal before it leaves."""
        spec, rows, round = attempt.round.spec, attempt.rows, attempt.round
        assert rows is not None
        clients, senders = round.accepted, attempt.counted.sites
        try:
            await asyncio.to_thread(self._keep_key, spec.attempt)
            facts = (clients, attempt.cohort.bits(clients), round.digests(clients), senders)
            free = await self.journalled(self.journal.release, spec.attempt, *facts)
            state.model = attempt.model = None  # nobody fetches a round that is over
            give_back()
            header = pb.ReleaseHeader(phase="released", count=len(clients), length=spec.length)
            if free and round.may_release(senders):
                header.counts, header.counted = sent(attempt.counted.total()), len(senders)
            matrix, tiers = await asyncio.to_thread(rows.gather, clients)
            terms: dict[str, Any] = {}
            if spec.farewell:
                await self._record(attempt, clients, {}, [], Farewell(round=spec.farewell))
            else:
                labels, terms = await self._mix(attempt, clients, matrix, tiers, rows)
                header.tiers.extend(labels)
        except BaseException as error:
            round.revoke(str(error))
            attempt.forget()
            raise
        attempt.result, attempt.delivered = (header, matrix), True
        self.log("released", **spec.where, count=len(clients), floor=round.least, **terms)

    def _keep_key(self, attempt: str) -> None:
        """The key is on the disk before the journal says that the attempt was released, and is not made twice."""
        if self.federation.reproducible:
            return
        if self.journal.released(attempt) is not None:
            self._secrets.check(attempt)
        self._secrets.of(attempt)

    async def _mix(
        self, attempt: Attempt, clients: Sequence[str], matrix: Payload, tiers: list[str], rows: Rows
    ) -> tuple[list[str], dict[str, Any]]:
        """Mix the rows in place; the label of each, and what the log says of it."""
        job, labels = await asyncio.to_thread(self._plan, tiers, attempt, clients)
        # How they are mixed, including the keys: only this reveals where every value came from.
        await self._record(attempt, clients, self.coding.stored(matrix), tiers, Mixing(job=job.to_json()))
        with self.metrics.phase("mixing"):
            await asyncio.to_thread(mix_apart, matrix, rows, job)
        sets = [len(mixed.members) for mixed in job.sets]  # nothing about who is in it, and no key
        return labels, {"level": job.level, "buckets": self._route.buckets, "sets": sets}

    async def _record(
        self, attempt: Attempt, clients: Sequence[str], arrays: dict[str, Any], tiers: list[str], event: Event
    ) -> None:
        """What this party received, if it records its view."""
        arrays = arrays | attempt.counted.stored(clients)
        if self.recorder is not None and arrays:
            record = partial(self.recorder.record, **filed(attempt.round.spec))
            await asyncio.to_thread(record, arrays=arrays, tiers=tiers, events=[*rows_of(clients), event])

    def _plan(self, tiers: list[str], attempt: Attempt, clients: Sequence[str]) -> tuple[Job, list[str]]:
        """Every mixing set with its own key, and the label of each row of the result."""
        round, length = attempt.round, attempt.round.spec.length
        sets = self._route.groups(tiers, round.run_by(clients), round.least)
        made = tuple(self._set(group, tiers, attempt, number) for number, group in enumerate(sets))
        layers = tuple(map(self.coding.length, attempt.layers)) or (length,)
        return Job(self._route.level, len(tiers), length, layers, made), [t for group in sets for t in group.tiers]

    def _set(self, group: Group, tiers: list[str], attempt: Attempt, number: int) -> MixingSet:
        """Its members and keys; with levelled buckets, also the noise that each row lacks."""
        missing = self._route.missing(self.federation, [tiers[member] for member in group.members])
        top_ups = (TopUp(m, self._key(attempt, f"level/{number}/{row}")) for row, m in enumerate(missing))
        return MixingSet(group.members, self._key(attempt, f"shuffle/{number}"), tuple(top_ups))

    def _key(self, attempt: Attempt, purpose: str) -> bytes:
        """Bound to run, round and attempt; seeded only if the federation is reproducible."""
        spec = attempt.round.spec
        if not self.federation.reproducible:
            return keys.derive(self._secrets.of(spec.attempt), spec.run, spec.round, spec.attempt, purpose)
        return keys.derive(self.federation.seed.to_bytes(32, "big"), self.federation.name, spec.round, "", purpose)
