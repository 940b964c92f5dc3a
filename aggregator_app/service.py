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
from fl_privacy.errors import ProtocolError
from fl_privacy.ops.log import Log
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.machine import RoundSpec
from fl_privacy.round.rows import Rows
from fl_privacy.round.service import Middleware, Parts, first
from fl_privacy.routes.base import only
from fl_privacy.routes.shards import ShardsRoute
from fl_privacy.transcript.events import rows_of
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
        """The shard that the last round left is what this one starts from; a later one is rolled back."""
        model, _ = await asyncio.to_thread(self._store.load, state.name, header.round - 1)
        if self.coding.length(model.size) != header.length:
            raise ProtocolError("INVALID_ARGUMENT", f"length: {header.length} where this shard has {model.size}")
        return model

    async def seed(self, parts: Parts, context: Any) -> pb.Empty:
        """The evaluator hands over the initial shard, once a run."""
        self._peer(context, "evaluator")
        header = header_of(await first(parts), "vector")
        self._check_unseeded(header.run)
        state = self._state(header.run, create=True)
        shard = await self.take_model(header.length, header.digest, parts)
        self._check_unseeded(header.run)  # the run may have begun while the shard came
        await asyncio.to_thread(self._store.save, state.name, 0, shard, {})
        self.put_model(state, shard, 0)
        return pb.Empty()

    def _check_unseeded(self, run: str) -> None:
        if self._store.newest(run) is not None:
            raise ProtocolError("ALREADY_EXISTS", "seed: this run has begun")

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """Who is in, as a digest, and how many: the server compares the aggregators before it lets them settle."""
        members = "\n".join((attempt.round.spec.attempt, *attempt.round.accepted))
        yield pb.Chunk(
            release=pb.ReleaseHeader(
                phase=str(attempt.round.phase),
                count=len(attempt.round.accepted),
                members=hashlib.sha256(members.encode()).digest(),
            )
        )

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.Empty:
        """All aggregators closed the round: apply it. Or one did not: drop it."""
        self._peer(context, "server")
        attempt, state = self._attempt(request.run, request.round), self._state(request.run)
        if attempt.round.spec.attempt != request.attempt:
            raise ProtocolError("FAILED_PRECONDITION", "attempt: not the one that is open")
        if not request.commit:
            attempt.fail("another aggregator did not close this round")
            return pb.Empty()
        if attempt.settling is None:
            clients = attempt.round.release()
            self.released.add(request.attempt)
            attempt.settling = asyncio.create_task(self._settle(state, attempt, clients))
        # A caller that goes away must not leave a round half settled, and one that asks again gets the same answer.
        await asyncio.shield(attempt.settling)
        return pb.Empty()

    async def _settle(self, state: RunState, attempt: Attempt, clients: tuple[str, ...]) -> None:
        spec, rows, model = attempt.round.spec, attempt.rows, state.model
        assert rows is not None
        assert model is not None
        try:
            with self.metrics.phase("averaging"):
                shard, moments = await asyncio.to_thread(self._apply, spec, rows, model, clients)
            with self.metrics.phase("releasing"):
                await asyncio.to_thread(self._store.save, spec.run, spec.round, shard, moments)
            attempt.delivered = True
        finally:
            attempt.forget()
        if state.attempt is attempt:
            self.put_model(state, shard, spec.round)
        terms: dict[str, Any] = {"attempt": spec.attempt, "floor": attempt.round.needed}
        self.log("released", run=spec.run, round=spec.round, count=len(clients), **terms)

    def _apply(
        self, spec: RoundSpec, rows: Rows, model: Array, clients: tuple[str, ...]
    ) -> tuple[Array, dict[str, NDArray[Any]]]:
        matrix, tiers = rows.gather(clients)
        if self.recorder is not None:
            stored = self.coding.stored(matrix)
            self.recorder.record(spec.run, spec.round, spec.attempt, stored, tiers, rows_of(clients))
        combiner = Combiner(self.federation)
        combiner.restore(self._store.load(spec.run, spec.round - 1)[1])
        shard = combiner.step(model, self.coding.decode(matrix, model.size), tiers)
        return shard, combiner.state()
