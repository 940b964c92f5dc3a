"""The shuffler: takes updates from sites it knows, hands the server a mixture of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fl_privacy.config import Federation, Ldp, ShufflerRoute
from fl_privacy.dp import ldp
from fl_privacy.errors import ConfigError
from fl_privacy.log import Log
from fl_privacy.shuffle import LEVELS, Matrix, keys, reorder
from fl_privacy.shuffle.mixing import groups
from fl_privacy.transcript import ViewWriter
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.buffers import give_back, keep_buffers
from fl_privacy.wire.middleware import Attempt, Middleware, Parts, RunState
from fl_privacy.wire.stream import chunks


class Shuffler(Middleware):
    """Parameter, layer or model shuffling; the key is fresh for every attempt and forgotten with it."""

    def __init__(self, federation: Federation, log: Log, recorder: ViewWriter | None = None) -> None:
        super().__init__(federation, log, recorder)
        if not isinstance(federation.route, ShufflerRoute):
            raise ConfigError(f"route.kind: {federation.route.kind!r} has no shuffler; use shuffler")
        self._level = LEVELS[federation.route.level]

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Matrix:
        keep_buffers()  # until the next `give_back`
        return await self.take_model(header.length, header.model, parts)

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        spec, rows = attempt.round.spec, attempt.rows
        clients = attempt.round.release()
        assert rows is not None
        self.released.add(spec.attempt)
        state.model = None  # nobody fetches a round that is over
        give_back()
        try:
            matrix, tiers = await asyncio.to_thread(rows.gather, clients)
            if self.recorder is not None:
                events = [{"name": name, "row": row} for row, name in enumerate(clients)]
                await asyncio.to_thread(
                    self.recorder.record, spec.round, spec.attempt, {"updates": matrix}, tiers, events
                )
            labels = await asyncio.to_thread(self._mix, matrix, tiers, attempt)
            self.log("released", run=spec.run, round=spec.round, count=len(clients))
            header = pb.ReleaseHeader(phase="released", count=len(clients), tiers=labels, length=spec.length)
            for part in chunks(pb.Chunk(release=header), matrix):
                yield part
        finally:
            attempt.forget()

    def _mix(self, matrix: Matrix, tiers: list[str], attempt: Attempt) -> list[str]:
        """Shuffle every mixing set on its own, in place; returns the label of each row of the result."""
        assert isinstance(self.federation.route, ShufflerRoute)
        sets = groups(tiers, self.federation.route)
        reorder(matrix, [member for group in sets for member in group.members])
        starts = (0, *attempt.layers[:-1])
        layers = [slice(start, end) for start, end in zip(starts, attempt.layers, strict=True)]
        done = 0
        for number, group in enumerate(sets):
            part = matrix[done : done + len(group.members)]
            if self.federation.route.buckets == "levelled":
                self._level_noise(part, [float(tiers[member]) for member in group.members], attempt, number)
            self._level(part, self._key(attempt, f"shuffle/{number}"), layers)
            done += len(group.members)
        return [tier for group in sets for tier in group.tiers]

    def _level_noise(self, part: Matrix, epsilons: list[float], attempt: Attempt, number: int) -> None:
        """Bring every row to the noise of the bucket's smallest budget: variances then tell rows apart no more."""
        assert isinstance(self.federation.privatise, Ldp)
        bound, delta = self.federation.privatise.clip, self.federation.privatise.delta
        for row, epsilon in enumerate(epsilons):
            key = self._key(attempt, f"level/{number}/{row}")
            ldp.top_up(part[row], bound, epsilon, min(epsilons), delta, key)

    def _key(self, attempt: Attempt, purpose: str) -> bytes:
        """Bound to run, round and attempt; seeded only where the federation asks to be repeatable."""
        spec = attempt.round.spec
        if not self.federation.reproducible:
            return keys.derive(keys.fresh(), spec.run, spec.round, spec.attempt, purpose)
        return keys.derive(self.federation.seed.to_bytes(32, "big"), self.federation.name, spec.round, "", purpose)
