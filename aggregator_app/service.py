"""A shard aggregator: averages its shard of every update and serves the new shard; the server gets no coordinate."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine.rules import Combiner
from fl_privacy.config import Federation
from fl_privacy.errors import require
from fl_privacy.ops.log import Log
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.checkpoints import Arrays
from fl_privacy.round.machine import RoundSpec
from fl_privacy.round.rows import Rows
from fl_privacy.round.service import Middleware, Parts, first
from fl_privacy.routes.base import only
from fl_privacy.routes.shards import ShardsRoute
from fl_privacy.transcript.events import Event, Farewell, filed, rows_of
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import header_of

from .state import ShardStore

Array = NDArray[np.float32]


class Aggregator(Middleware):
    """A round is settled in two steps, so that either all aggregators move on or none does."""

    def __init__(self, federation: Federation, folder: Path, log: Log, recorder: RunRecorder | None = None) -> None:
        super().__init__(federation, log, recorder)
        only(federation.route, ShardsRoute, "aggregators")
        self._store = ShardStore(folder)

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Array:
        """The round starts from the shard after the previous one; a later shard is rolled back."""
        model, _ = await asyncio.to_thread(self._store.load, state.name, header.farewell or header.round - 1)
        length = 0 if header.farewell else self.coding.length(model.size)
        require(header.length == length, f"length: {header.length}, but this shard has {length}")
        return model

    async def seed(self, parts: Parts, context: Any) -> pb.Empty:
        """The evaluator hands over the initial shard, once per run."""
        self._peer(context, "evaluator")
        header = header_of(await first(parts), "vector")
        self._check_unseeded(header.run)
        state = self._state(header.run, create=True)
        shard = await self.take_model(header.length, header.digest, parts)
        self._check_unseeded(header.run)  # the run may have started while the shard arrived
        await asyncio.to_thread(self._store.save, state.name, 0, shard, {})
        self.put_model(state, shard, 0)
        return pb.Empty()

    def _check_unseeded(self, run: str) -> None:
        require(self._store.newest(run) is None, "seed: this run has already started", "ALREADY_EXISTS")

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """How many updates, and a digest of whose: the server compares the aggregators before it lets them settle."""
        round, counted = attempt.round, attempt.counted
        named = "\n".join((round.spec.attempt, *round.accepted, "", *sorted(counted.sites)))
        members, added = hashlib.sha256(named.encode()).digest(), counted.release(round.least)
        count = len(round.accepted)
        yield pb.Chunk(release=pb.ReleaseHeader(phase=str(round.phase), count=count, members=members, **added))

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.Empty:
        """All aggregators closed the round: apply it. Or one did not: drop it."""
        self._peer(context, "server")
        attempt, state = self._attempt(request.run, request.round, request.attempt), self._state(request.run)
        if not request.commit:
            attempt.fail("another aggregator did not close this round")
            return pb.Empty()
        if attempt.settling is None:
            clients = attempt.round.release()
            self.released.add(request.attempt)
            attempt.settling = asyncio.create_task(self._settle(state, attempt, clients))
        # A caller that disconnects must not leave a round half settled; one that asks again gets the same answer.
        await asyncio.shield(attempt.settling)
        return pb.Empty()

    async def _settle(self, state: RunState, attempt: Attempt, clients: tuple[str, ...]) -> None:
        spec, rows, model = attempt.round.spec, attempt.rows, state.model
        assert rows is not None
        assert model is not None
        counts = attempt.counted.stored(clients)
        shard = None
        try:
            if spec.farewell:
                await asyncio.to_thread(self._record, spec, clients, counts, [], Farewell(round=spec.farewell))
            else:
                with self.metrics.phase("averaging"):
                    shard, moments = await asyncio.to_thread(self._apply, spec, rows, model, clients, counts)
                with self.metrics.phase("releasing"):
                    await asyncio.to_thread(self._store.save, spec.run, spec.round, shard, moments, spec.best)
            attempt.delivered = True
        finally:
            attempt.forget()
        if shard is not None and state.attempt is attempt:
            self.put_model(state, shard, spec.round)
        self.log("released", **spec.where, count=len(clients), floor=attempt.round.needed)

    def _apply(
        self, spec: RoundSpec, rows: Rows, model: Array, clients: tuple[str, ...], counts: Arrays
    ) -> tuple[Array, Arrays]:
        matrix, tiers = rows.gather(clients)
        self._record(spec, clients, self.coding.stored(matrix) | counts, tiers)
        combiner = Combiner(self.federation)
        combiner.restore(self._store.load(spec.run, spec.round - 1)[1])
        shard = combiner.step(model, self.coding.decode(matrix, model.size), tiers)
        return shard, combiner.state()

    def _record(
        self, spec: RoundSpec, clients: tuple[str, ...], arrays: Arrays, tiers: list[str], *events: Event
    ) -> None:
        """What this party received, if it records its view."""
        if self.recorder is not None and arrays:
            self.recorder.record(**filed(spec), arrays=arrays, tiers=tiers, events=[*rows_of(clients), *events])
