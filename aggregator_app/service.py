"""A shard aggregator: averages its shard of every update and serves the new shard; the server gets no coordinate."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.combine import mean, optimiser
from fl_privacy.config import Federation, ShardsRoute
from fl_privacy.errors import ConfigError, ProtocolError
from fl_privacy.log import Log
from fl_privacy.protocol import Phase
from fl_privacy.transcript import ViewWriter
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.identity import peer
from fl_privacy.wire.middleware import Attempt, Middleware, Parts, RunState
from fl_privacy.wire.stream import header_of

from .state import ShardStore


class Aggregator(Middleware):
    """A round is settled in two steps, so that either all aggregators move on or none does."""

    def __init__(
        self, federation: Federation, folder: Path, log: Log, recorder: ViewWriter | None = None
    ) -> None:
        super().__init__(federation, log, recorder)
        if not isinstance(federation.route, ShardsRoute):
            raise ConfigError(f"route.kind: {federation.route.kind!r} has no aggregators; use shards")
        self._store = ShardStore(folder)

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> None:
        """The shard that the last round left is what this one starts from; a later one is rolled back."""
        model, _ = await asyncio.to_thread(self._store.load, state.name, header.round - 1)
        if model.size != header.length:
            raise ProtocolError("INVALID_ARGUMENT", f"length: {header.length} where this shard has {model.size}")
        self.put_model(state, model)
        state.version = header.round - 1

    async def seed(self, parts: Parts, context: Any) -> pb.Empty:
        """The evaluator hands over the initial shard, once a run."""
        peer(context, self.federation.name, "evaluator")
        header = None
        async for part in parts:
            header = header_of(part, "vector")
            break
        if header is None:
            raise ProtocolError("INVALID_ARGUMENT", "stream: empty")
        state = self._state(header.run, create=True)
        if self._store.newest(state.name) is not None:
            raise ProtocolError("ALREADY_EXISTS", "seed: this run has begun")
        await self.take_model(state, header.length, header.digest, parts)
        assert state.model is not None
        await asyncio.to_thread(self._store.save, state.name, 0, state.model, {})
        return pb.Empty()

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
        peer(context, self.federation.name, "server")
        attempt, state = self._attempt(request.run, request.round), self._state(request.run)
        if attempt.round.spec.attempt != request.attempt:
            raise ProtocolError("FAILED_PRECONDITION", "attempt: not the one that is open")
        if not request.commit:
            attempt.fail("another aggregator did not close this round")
            return pb.Empty()
        if attempt.round.phase is Phase.RELEASED:
            return pb.Empty()  # the answer to the first call was lost
        clients = attempt.round.release()
        state.released.add(request.attempt)
        shard, moments = await asyncio.to_thread(self._apply, state, attempt, clients)
        await asyncio.to_thread(self._store.save, state.name, request.round, shard, moments)
        attempt.rows = None
        self.put_model(state, shard)
        state.version = request.round
        self.log("released", run=request.run, round=request.round, count=len(clients))
        return pb.Empty()

    def _apply(
        self, state: RunState, attempt: Attempt, clients: tuple[str, ...]
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[Any]]]:
        assert attempt.rows is not None
        assert state.model is not None
        matrix, tiers = attempt.rows.gather(clients)
        spec = attempt.round.spec
        if self.recorder is not None:
            events = [{"name": name, "row": row} for row, name in enumerate(clients)]
            self.recorder.record(spec.round, spec.attempt, {"updates": matrix}, tiers, events)
        rule = optimiser.make(**self.federation.combine.model_dump(exclude={"mu"}))
        rule.restore(self._store.load(state.name, spec.round - 1)[1])
        shard = rule.step(state.model, mean.weighted(matrix, exact=self.federation.reproducible))
        return shard, rule.state()
