"""The aggregator of one region: it adds up its sites' updates, and gives the server the sum."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.deploy.parties import index
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.counted import sent
from fl_privacy.round.machine import RoundSpec
from fl_privacy.round.service import Middleware, Parts
from fl_privacy.routes.base import only
from fl_privacy.routes.hierarchical import EXACT, HierarchicalRoute, encoded
from fl_privacy.transcript.events import Event, Farewell, filed, rows_of
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import chunks


class Region(Middleware):
    """It knows the updates of its sites and who sent them; only their sum leaves, and none below the floor."""

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
        self._route, self._name = only(federation.route, HierarchicalRoute, "region"), name
        self._own = frozenset(self._route.members(federation)[index(name)])
        self._all = Cohort(sorted(self._own), bytes(32))  # journalled are places among these, whatever the cohort

    def _site(self, context: Any) -> str:
        site = super()._site(context)
        require(site in self._own, f"region: {site} is not of {self._name}", "PERMISSION_DENIED")
        return site

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> Vector:
        fits = header.length == (0 if header.farewell else self.coding.length(header.parameters))
        require(fits, f"length: {header.length} for {header.parameters} parameters")
        return await self.take_model(state, header.parameters, header.model, parts)

    def collected_here(self, spec: RoundSpec, cohort: Cohort) -> tuple[RoundSpec, Sequence[str]]:
        """So many of ours that, with everybody elsewhere, the quorum is met: below it a sum would leave for nothing."""
        own = [site for site in cohort.sites if site in self._own]
        few = f"sites: {len(own)} of {self._name} in this cohort, of fewer organisations than the floor"
        require(self.keys.roster().organisations(own) >= self.federation.floor, few)
        return replace(spec, cohort=len(own), quorum=max(1, spec.quorum - (spec.cohort - len(own)))), own

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """The updates come again; what was released before is released with the same ones or not at all."""

    def _asked_again(self, state: RunState) -> pb.Empty:
        """Another region may have lost its updates; those of ours are here."""
        return pb.Empty()

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """The same bytes whenever the server asks, until it says that they are on its disk."""
        if attempt.settling is None:
            attempt.round.release()
            attempt.settling = asyncio.create_task(self._release(attempt))
        await asyncio.shield(attempt.settling)
        if attempt.result is None:
            raise ProtocolError("FAILED_PRECONDITION", f"round: {attempt.round.spec.round} was released and is gone")
        header, total = attempt.result
        with self.metrics.phase("releasing"):
            for part in chunks(pb.Chunk(release=header), [total]):
                yield part
                self.metrics.moved("out", part.nbytes if isinstance(part, memoryview) else 0)

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        """The sum has arrived, or nobody wants it: the updates are forgotten."""
        attempt = self.asked(request, context)
        if attempt.settling is not None:
            await asyncio.wait([attempt.settling])
        attempt.fail("the server gave it up")
        attempt.forget()
        await self.journalled(self.journal.confirm, request.attempt)
        return pb.SettleReply()

    async def _release(self, attempt: Attempt) -> None:
        """What leaves is in the journal before it leaves."""
        spec, round = attempt.round.spec, attempt.round
        try:
            clients = self._members(attempt)
            senders = tuple(site for site in attempt.counted.sites if site in clients)
            counts = sent(attempt.counted.total(senders))
            with self.metrics.phase("adding"):  # first: what has no sum must not keep other sites from being released
                total = await asyncio.to_thread(self._added, attempt, clients)
            facts = (clients, self._all.bits(clients), round.digests(clients), senders)
            free = await self.journalled(self.journal.release, spec.attempt, *facts)
            header = pb.ReleaseHeader(phase="released", count=len(clients), length=total.size)
            if free and round.may_release(senders):
                header.counts, header.counted = counts, len(senders)
        except BaseException as error:
            round.revoke(str(error))
            attempt.forget()
            raise
        attempt.result, attempt.delivered = (header, total), True
        self.log("released", **spec.where, count=len(clients), floor=round.least)

    def _members(self, attempt: Attempt) -> tuple[str, ...]:
        """Whose updates leave: those of the same sites as in an earlier attempt, which failed elsewhere."""
        round, terms = attempt.round, attempt.terms
        before = None if terms.farewell else self.journal.released_for(terms.run, terms.model.hex())
        if before is None:
            return round.accepted
        released = self._all.of_bits(before)
        gone = "members: this model was released for other sites, and not all of them are here"
        require(set(released) <= set(round.accepted), gone, "FAILED_PRECONDITION")
        few = f"members: {len(released)} are too few"
        require(len(released) >= round.spec.quorum and round.may_release(released), few, "FAILED_PRECONDITION")
        return released

    def _added(self, attempt: Attempt, clients: Sequence[str]) -> Payload:
        """The sum of these sites' updates, which are recorded first if this party records its view."""
        rows, arrays, events = attempt.rows, attempt.counted.stored(clients), list[Event](rows_of(clients))
        if rows is None:
            raise ProtocolError("FAILED_PRECONDITION", f"round {attempt.round.spec.round} is over")
        matrix, tiers = rows.gather(clients)
        form = self._route.form(self.federation)
        if attempt.round.spec.farewell:
            tiers, total = [], np.empty(0, form.type)
            events.append(Farewell(round=attempt.round.spec.farewell))
        else:
            arrays |= self.coding.stored(matrix)
            total = encoded(self.coding.decode(matrix, attempt.parameters), form is EXACT)
        if self.recorder is not None and arrays:
            self.recorder.record(**filed(attempt.round.spec), arrays=arrays, tiers=tiers, events=events)
        return total
