"""A shard aggregator: averages its shard of every update and serves the new shard; the server gets no coordinate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.errors import require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.checkpoints import Arrays
from fl_privacy.round.counted import sent
from fl_privacy.round.machine import Phase, RoundSpec
from fl_privacy.round.rows import Rows
from fl_privacy.round.service import Middleware, Parts, first
from fl_privacy.round.shard_store import DECODER, SHARD, START, Kept, ShardStore, stepped
from fl_privacy.round.terms import joined
from fl_privacy.transcript.events import Event, Farewell, filed, rows_of
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import digest, header_of

Array = NDArray[np.float32]


class Aggregator(Middleware):
    """A round is settled in two steps, so that either all aggregators move on or none does."""

    def __init__(
        self, federation: Federation, keys: Keyring, state: Path, log: Log, recorder: RunRecorder | None = None
    ) -> None:
        super().__init__(federation, keys, state, log, recorder)
        self._partial, self._cuts = federation.route.tolerant, federation.route.joins_every_round
        self._store = ShardStore(state / "shards")

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Array:
        """The round starts from the shard after the previous one; a later shard is rolled back."""
        model, _ = await asyncio.to_thread(self._after, state.name, header.farewell or header.round - 1)
        length = 0 if header.farewell else self.coding.length(model.size)
        require(header.length == length, f"length: {header.length}, but this shard has {length}")
        return model

    def model_digest(self, header: pb.RoundHeader, model: Array) -> bytes:
        """The model is known by the digests of its shards, and ours must be among them."""
        ours = digest(model) in header.shards
        require(ours, "shards: another model than this aggregator has a shard of", "FAILED_PRECONDITION")
        return joined(list(header.shards))

    async def shard(self, request: pb.ShardRequest, context: Any) -> pb.ShardReply:
        """The digest of our shard after a round: the server puts it into the terms of the next one."""
        self._peer(context, "server")
        model, _ = await asyncio.to_thread(self._after, request.run, request.round)
        return pb.ShardReply(digest=digest(model))

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """It may have been applied before this process was restarted: then only other aggregators need it again."""
        if not attempt.round.spec.farewell:
            _, kept = await asyncio.to_thread(self._after, state.name, attempt.round.spec.round - 1)
            attempt.decoder.restore(kept[DECODER])
        spec, bits = attempt.round.spec, self.journal.released(attempt.terms.name)
        if bits is None or spec.farewell or (self._store.newest(spec.run) or 0) < spec.round:
            return
        shard, _ = await asyncio.to_thread(self._store.load, spec.run, spec.round)
        self.put_model(state, shard, spec.round)
        attempt.round.phase, attempt.delivered, attempt.applied = Phase.RELEASED, True, attempt.cohort.of_bits(bits)
        attempt.forget()
        attempt.notice()
        attempt.repeat()

    def _after(self, run: str, round: int) -> tuple[Array, dict[str, Arrays]]:
        """The shard that the round after it starts from, and what is kept with it.

        With partial settlement it may be an older round's. With masks per round it is what the evaluator cut.
        """
        if self._partial:
            round = max((one for one in self._store.rounds(run) if one <= round), default=round)
        shard, kept = self._store.load(run, round)
        if self._cuts and round:
            uncut = f"shard: the model after round {round} was not cut for the next one yet"
            require(START in kept, uncut, "FAILED_PRECONDITION")
            shard = kept[START][SHARD]
        return shard, kept

    def _state(self, run: str, create: bool = False) -> RunState:
        """A run whose shard is on the disk is known, also after a restart."""
        if run not in self.runs and not create and (newest := self._store.newest(run)) is not None:
            state = super()._state(run, create=True)
            self.put_model(state, self._store.load(run, newest)[0], newest)
        return super()._state(run, create)

    async def seed(self, parts: Parts, context: Any) -> pb.Empty:
        """The evaluator hands over the initial shard, or with masks per round the one after each round; each once."""
        self._peer(context, "evaluator")
        header = header_of(await first(parts), "vector")
        self._check_unseeded(header.run, header.round)
        state = self._state(header.run, create=not header.round)
        shard = await self.take_model(state, header.length, header.digest, parts)
        self._check_unseeded(header.run, header.round)  # the run may have started while the shard arrived
        if header.round:
            await asyncio.to_thread(self._store.add_start, state.name, header.round, shard)
        else:
            await asyncio.to_thread(self._store.save, state.name, 0, shard, {})
            self.put_model(state, shard, 0)
        return pb.Empty()

    def _check_unseeded(self, run: str, round: int) -> None:
        newest = self._store.newest(run)
        if not round:
            require(newest is None, "seed: this run has already started", "ALREADY_EXISTS")
            return
        require(self._cuts, "seed: the masks of this federation do not change", "PERMISSION_DENIED")
        require(newest == round, f"seed: this shard is after round {newest}, not {round}", "FAILED_PRECONDITION")
        there = START in self._store.load(run, round)[1]
        require(not there, f"seed: the shard after round {round} is here", "ALREADY_EXISTS")

    async def newest(self, state: RunState) -> tuple[int, Array | None]:
        """With masks per round, the shard that a round ended with, and not the one that the next starts from."""
        round = self._store.newest(state.name)
        if not self._cuts or not round or state.model is None:
            return await super().newest(state)
        return round, (await asyncio.to_thread(self._store.load, state.name, round))[0]

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """Whose updates and counts are here: the server tells the aggregators to apply what all of them have."""
        members = attempt.round.accepted if attempt.applied is None else attempt.applied
        header = pb.ReleaseHeader(phase=Phase.CLOSED, count=len(members), members=attempt.cohort.bits(members))
        header.senders = attempt.cohort.bits(attempt.counted.sites)
        yield pb.Chunk(release=header)

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        """Apply the round with what all aggregators have, or drop it; asking twice gets the same answer."""
        attempt, state = self.asked(request, context), self._state(request.run)
        if not request.commit:
            attempt.fail("another aggregator did not close this round")
            return pb.SettleReply()
        chosen, senders = (attempt.cohort.of_bits(bits) for bits in (request.members, request.senders))
        if attempt.applied is not None:
            require(attempt.applied == chosen, "members: this round was settled with others", "FAILED_PRECONDITION")
        elif attempt.settling is None:
            attempt.check_chosen(chosen, senders)
            attempt.round.release()
            attempt.settling = asyncio.create_task(self._settle(state, attempt, chosen, senders))
        if attempt.settling is not None:
            # A caller that disconnects must not leave a round half settled.
            await asyncio.shield(attempt.settling)
        return attempt.reply

    async def _settle(
        self, state: RunState, attempt: Attempt, clients: tuple[str, ...], senders: tuple[str, ...]
    ) -> None:
        spec, rows, model = attempt.round.spec, attempt.rows, state.model
        assert rows is not None
        assert model is not None
        shard = None
        try:
            facts = (spec.attempt, clients, attempt.cohort.bits(clients), (), senders)
            free = await self.journalled(self.journal.release, *facts)
            counts = attempt.counted.stored(clients)
            if free and attempt.round.may_release(senders):
                attempt.reply = pb.SettleReply(counts=sent(attempt.counted.total(senders)), counted=len(senders))
            if spec.farewell:
                await asyncio.to_thread(self._record, spec, clients, counts, [], Farewell(round=spec.farewell))
            else:
                with self.metrics.phase("averaging"):
                    shard, kept = await asyncio.to_thread(self._apply, attempt, rows, model, clients, counts)
                with self.metrics.phase("releasing"):
                    await asyncio.to_thread(self._store.save, spec.run, spec.round, shard, kept, spec.best)
        except BaseException as error:
            attempt.round.revoke(str(error))
            raise
        finally:
            attempt.forget()
        attempt.delivered, attempt.applied = True, clients
        if shard is not None and state.attempt is attempt:
            self.put_model(state, shard, spec.round)
        self.log("released", **spec.where, count=len(clients), floor=attempt.round.least)

    def _apply(
        self, attempt: Attempt, rows: Rows, model: Array, clients: tuple[str, ...], counts: Arrays
    ) -> tuple[Array, Kept]:
        spec, before = attempt.round.spec, self._after(attempt.round.spec.run, attempt.round.spec.round - 1)[1]
        records = rows.records(clients)
        matrix, tiers = rows.gather(clients)
        self._record(spec, clients, self.coding.stored(matrix) | counts, tiers)
        terms = (attempt.decoder, matrix, clients, spec.round, tiers, records)
        return stepped(self.federation, model, before, *terms)

    def _record(
        self, spec: RoundSpec, clients: tuple[str, ...], arrays: Arrays, tiers: list[str], *events: Event
    ) -> None:
        """What this party received, if it records its view."""
        if self.recorder is not None and arrays:
            self.recorder.record(**filed(spec), arrays=arrays, tiers=tiers, events=[*rows_of(clients), *events])
