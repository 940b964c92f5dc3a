"""The shuffler: takes updates from sites it knows, hands the server a mixture of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fl_privacy.config import Federation, ShufflerRoute
from fl_privacy.errors import ConfigError
from fl_privacy.log import Log
from fl_privacy.shuffle import LEVELS, Matrix, keys
from fl_privacy.transcript import ViewWriter
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.middleware import Attempt, Middleware, Parts, RunState
from fl_privacy.wire.rows import give_back_memory
from fl_privacy.wire.stream import chunks


class Shuffler(Middleware):
    """Parameter, layer or model shuffling; the key is fresh for every attempt and forgotten with it."""

    def __init__(self, federation: Federation, log: Log, recorder: ViewWriter | None = None) -> None:
        super().__init__(federation, log, recorder)
        if not isinstance(federation.route, ShufflerRoute):
            raise ConfigError(f"route.kind: {federation.route.kind!r} has no shuffler; use shuffler")
        self._level = LEVELS[federation.route.level]

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Matrix:
        return await self.take_model(header.length, header.model, parts)

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        spec, rows = attempt.round.spec, attempt.rows
        clients = attempt.round.release()
        assert rows is not None
        self.released.add(spec.attempt)
        state.model = None  # nobody fetches a round that is over
        give_back_memory()
        try:
            matrix, tiers = await asyncio.to_thread(rows.gather, clients)
            if self.recorder is not None:
                events = [{"name": name, "row": row} for row, name in enumerate(clients)]
                await asyncio.to_thread(
                    self.recorder.record, spec.round, spec.attempt, {"updates": matrix}, tiers, events
                )
            key = self._key(spec.run, spec.round, spec.attempt)
            starts = (0, *attempt.layers[:-1])
            layers = [slice(start, end) for start, end in zip(starts, attempt.layers, strict=True)]
            await asyncio.to_thread(self._level, matrix, key, layers)
            self.log("released", run=spec.run, round=spec.round, count=len(clients))
            header = pb.ReleaseHeader(phase="released", count=len(clients), tiers=sorted(tiers), length=spec.length)
            for part in chunks(pb.Chunk(release=header), matrix):
                yield part
        finally:
            attempt.forget()

    def _key(self, run: str, round: int, attempt: str) -> bytes:
        """Bound to run, round and attempt; seeded only where the federation asks to be repeatable."""
        if not self.federation.reproducible:
            return keys.derive(keys.fresh(), run, round, attempt, "shuffle")
        return keys.derive(self.federation.seed.to_bytes(32, "big"), self.federation.name, round, "", "shuffle")
