"""`python -m aggregator_app.mailbox`: carries sealed shards between sites that aggregate, and can read none of them.

It opens and closes rounds as any middleware does, from who has sent something. Then it gives every aggregating site its
column of sealed shards, asks all of them to apply what all could open, and keeps their sealed shards of the new model
for the sites.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import FLOAT32
from fl_privacy.config import Federation
from fl_privacy.crypto import sealing
from fl_privacy.deploy import process
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import Keyring, certificate_of
from fl_privacy.ops.log import Log
from fl_privacy.round import shard_statements
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.counted import received, sent
from fl_privacy.round.letters import CARD
from fl_privacy.round.machine import Phase
from fl_privacy.round.resident import APPLY, CARD as CARD_DUTY, CHECK, MODEL, SEND
from fl_privacy.round.service import Middleware, Offer, Parts, first
from fl_privacy.round.shard_statements import Equivocation
from fl_privacy.round.terms import joined
from fl_privacy.routes.base import only
from fl_privacy.routes.shards import ShardsRoute
from fl_privacy.scores.shares import added
from fl_privacy.shard import masks
from fl_privacy.shard.sealed import SEALED, sizes
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import Receiver, digest, header_of

from .carried import Carried, Carrying, Held, Signed
from .letterbox import Letterbox

LARGEST_ENVELOPE = 4096  # bytes
MOST_OPENING = 64
CLOSED = "FAILED_PRECONDITION"


class Mailbox(Middleware):
    """A round has a second half here, which the aggregating sites do; it has a deadline of its own."""

    blind: ClassVar[bool] = True

    def __init__(self, federation: Federation, keys: Keyring, state: Path, log: Log) -> None:
        super().__init__(federation, keys, state, log)
        self._route = only(federation.route, ShardsRoute, "mailbox")
        self._plain, self.coding = self.coding, SEALED
        self._sites = self._route.aggregating(federation)
        self._runs: dict[str, Carrying] = {}
        self._opening: dict[str, tuple[pb.RoundHeader, list[int]]] = {}
        self._signed = Signed(state / "signed")

    # Opening and closing

    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> NDArray[np.float32]:
        """There is no model here; the server says which shards the round starts from, and the sites check it."""
        stopped = self._signed.stopped(state.name)
        require(not stopped, stopped, "PERMISSION_DENIED")
        count = len(self._sites)
        require(len(header.shards) == count, f"shards: {len(header.shards)} digests for {count} aggregating sites")
        made = sizes([0] * count if header.farewell else self._shard_bytes(header), header.counts)
        require(header.length == sum(made), f"length: {header.length}, but a round has {sum(made)} bytes per site")
        while len(self._opening) >= MOST_OPENING:  # attempts whose terms were refused
            self._opening.pop(next(iter(self._opening)))
        self._opening[header.attempt] = header, made
        return np.empty(0, np.float32)

    def _shard_bytes(self, header: pb.RoundHeader) -> list[int]:
        parameters = header.parameters
        require(parameters >= len(self._sites), f"parameters: {parameters} for {len(self._sites)} shards")
        return [self._plain.nbytes(size) for size in masks.sizes(parameters, len(self._sites), self._route.shares)]

    def model_digest(self, header: pb.RoundHeader, model: NDArray[np.float32]) -> bytes:
        return joined(list(header.shards))

    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """Sites send again what was lost, and the aggregating sites say again what they made of it."""
        header, made = self._opening.pop(attempt.terms.name)
        self._runs = {name: one for name, one in self._runs.items() if name in self.runs}
        self._of(state.name).now = Carried(header, attempt, made)

    async def shard(self, request: pb.ShardRequest, context: Any) -> pb.ShardReply:
        """The digests of all shards after a round."""
        self._peer(context, "server")
        return pb.ShardReply(shards=self._signed.shards(request.run, request.round))

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        raise ProtocolError("UNIMPLEMENTED", "settle: the aggregating sites settle a round among themselves")

    async def finish(self, request: pb.FinishRequest, context: Any) -> pb.FinishReply:
        reply = await super().finish(request, context)
        self._runs.pop(request.run, None)
        return reply

    async def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """How many updates the new model has, and the sum of the counts."""
        carried = self._of(state.name).now
        if carried is None or carried.attempt is not attempt:
            raise ProtocolError(CLOSED, f"round: {attempt.round.spec.round} is not the newest")
        state.notify()
        try:
            async with asyncio.timeout(self.federation.deadline):
                await carried.done.wait()
        except TimeoutError:
            late = [site for index, site in enumerate(self._sites) if index not in carried.shared]
            self._give_up(state, carried, f"these aggregating sites did not answer in time: {', '.join(late)}")
        failed = pb.ReleaseHeader(phase=Phase.FAILED, reason=attempt.round.reason)
        yield pb.Chunk(release=carried.result or failed)

    def _give_up(self, state: RunState, carried: Carried, reason: str) -> None:
        """Nothing that is not complete counts."""
        if not carried.done.is_set():
            carried.attempt.round.revoke(reason)
            carried.attempt.notice()
            carried.attempt.forget()
            carried.done.set()
            state.notify()

    # What a site is wanted for

    async def due(self, state: RunState, request: pb.FetchRequest, site: str) -> Offer | None:
        if site not in state.mail.said(CARD):
            return pb.RoundHeader(run=state.name, duty=CARD_DUTY), None
        run = self._of(state.name)
        if run.now is None or run.now.attempt is not state.attempt:
            return None
        duty = self._duty(state, run, run.now, self._sites.index(site), request) if site in self._sites else None
        if duty is not None or not self._ready(state, run, run.now, site):
            return duty
        found = await super().due(state, request, site)
        found = found or self._to_cut(run.now, site)
        return None if found is None else self._with_model(found[0], run, run.now, site)

    def _duty(
        self, state: RunState, run: Carrying, carried: Carried, index: int, request: pb.FetchRequest
    ) -> Offer | None:
        phase, here = carried.attempt.round.phase, request.holds == carried.header.attempt
        if phase in (Phase.OPENED, Phase.COLLECTING):
            return self._asked_for(state, run, carried, index)
        if self._to_cut(carried, self._sites[index]) and self._ready(state, run, carried, self._sites[index]):
            return None
        over = carried.done.is_set() or carried.attempt.rows is None
        if phase not in (Phase.CLOSED, Phase.RELEASED) or over or index in carried.shared:
            return None
        if not here or (carried.decision is None and index not in carried.reports):
            bits = carried.attempt.cohort.bits(carried.attempt.round.accepted)
            return self._told(carried, CHECK, carried.column(index), members=bits)
        if carried.decision is None:
            return None
        return self._told(carried, APPLY, None, members=carried.decision[0], senders=carried.decision[1])

    def _asked_for(self, state: RunState, run: Carrying, carried: Carried, index: int) -> Offer | None:
        """Ask for a shard of the round's model that is not here, or not for all sites."""
        if not carried.version:
            return None
        held, sites = run.held.get(index), frozenset(state.mail.said(CARD))
        there = held is not None and held.said.digest == carried.header.shards[index]
        if there and held is not None and not sites - set(held.envelopes) - carried.asked.get(index, frozenset()):
            return None
        carried.asked[index] = sites
        return self._told(carried, SEND, None)

    def _to_cut(self, carried: Carried, site: str) -> Offer | None:
        """With masks per round, an aggregating site cuts its next shard from the model, also if it does not train."""
        wanted = self._route.joins_every_round and carried.version and not carried.header.farewell
        over = carried.attempt.round.phase not in (Phase.OPENED, Phase.COLLECTING, Phase.CLOSED, Phase.RELEASED)
        if not wanted or over or site not in self._sites or self._sites.index(site) in carried.modelled:
            return None
        return self._told(carried, MODEL, None)

    def _told(self, carried: Carried, duty: str, data: NDArray[np.uint8] | None, **facts: Any) -> Offer:
        header = pb.RoundHeader(duty=duty, **facts)
        header.MergeFrom(carried.header)
        header.digest = b"" if data is None else digest(data)
        return header, data

    def _ready(self, state: RunState, run: Carrying, carried: Carried, site: str) -> bool:
        """Whether the site could seal its update for all aggregating sites, and open the model."""
        if not set(self._sites) <= state.mail.said(CARD):
            return False
        return not carried.version or all(self._has(run, carried, index, site) for index in range(len(self._sites)))

    def _has(self, run: Carrying, carried: Carried, index: int, site: str) -> bool:
        held = run.held.get(index)
        return held is not None and held.said.digest == carried.header.shards[index] and site in held.envelopes

    def _with_model(self, header: pb.RoundHeader, run: Carrying, carried: Carried, site: str) -> Offer:
        if not carried.version:
            header.digest = b""
            return header, None
        shards = [run.held[index] for index in range(len(self._sites))]
        for one in shards:
            header.sealed.add(said=one.said, envelope=one.envelopes[site], length=one.data.size)
        data = np.concatenate([one.data for one in shards])
        header.digest = digest(data)
        if site in self._sites:
            carried.modelled.add(self._sites.index(site))
        return header, data

    # What aggregating sites answer

    async def report(self, request: pb.ReportRequest, context: Any) -> pb.Empty:
        """Which updates a site could open, or why it cannot do its part."""
        index, state, carried = self._asked_of(request, context)
        if request.problem:
            reason = " ".join(request.problem[:300].split())
            self._give_up(state, carried, f"{self._sites[index]}: {reason}")
            return pb.Empty()
        require(carried.attempt.round.phase in (Phase.CLOSED, Phase.RELEASED), "round: is not closed", CLOSED)
        cohort, accepted = carried.attempt.cohort, set(carried.attempt.round.accepted)
        members, senders = (frozenset(cohort.of_bits(bits)) for bits in (request.members, request.senders))
        require(senders <= members <= accepted, "members: not all of them sent something")
        carried.reports.setdefault(index, (members, senders, request.floor))
        if len(carried.reports) == len(self._sites) and carried.deciding is None:
            carried.deciding = asyncio.create_task(self._decide(state, carried))
        if carried.deciding is not None:
            await asyncio.shield(carried.deciding)
        return pb.Empty()

    def _asked_of(self, request: Any, context: Any) -> tuple[int, RunState, Carried]:
        """Which shard is the caller's, and the attempt that it answers for."""
        site = self._site(context)
        require(site in self._sites, "site: does not aggregate", "PERMISSION_DENIED")
        attempt, carried = self._attempt(request.run, request.round, request.attempt), self._of(request.run).now
        if carried is None or carried.attempt is not attempt:
            raise ProtocolError(CLOSED, "attempt: not the one that is open")
        return self._sites.index(site), self._state(request.run), carried

    async def _decide(self, state: RunState, carried: Carried) -> None:
        """The updates that every aggregating site could open; if they were released before, the same ones."""
        round, cohort, name = carried.attempt.round, carried.attempt.cohort, carried.header.attempt
        members = frozenset.intersection(*(one[0] for one in carried.reports.values()))
        senders = frozenset.intersection(*(one[1] for one in carried.reports.values()))
        before = self.journal.released(name)
        wanted = members if before is None else frozenset(cohort.of_bits(before))
        chosen, told = tuple(sorted(wanted)), tuple(sorted(senders & wanted))
        self._note_left_out(carried)
        floor = max(round.least, *(one[2] for one in carried.reports.values()))
        hidden = len(set(round.run_by(chosen))) >= floor
        if not wanted <= members or len(chosen) < round.spec.quorum or not hidden:
            needed = f"{round.spec.quorum} of {floor} organisations are needed"
            few = f"all aggregating sites could open {len(members)} updates, {needed}"
            self._give_up(state, carried, few if before is None else "an update of an earlier release is missing")
            return
        try:
            round.release()
            free = await self.journalled(self.journal.release, name, chosen, cohort.bits(chosen), (), told)
        except ProtocolError as error:
            self._give_up(state, carried, str(error))
            return
        told = told if free and round.may_release(told) else ()
        carried.decision = cohort.bits(chosen), cohort.bits(told)
        state.notify()

    def _note_left_out(self, carried: Carried) -> None:
        """For the operator: which aggregating site could not open whose update."""
        accepted = set(carried.attempt.round.accepted)
        for index, (members, *_) in carried.reports.items():
            if left_out := sorted(accepted - members):
                self.log("left-out", **carried.attempt.round.spec.where, by=self._sites[index], sites=left_out)

    async def share(self, parts: Parts, context: Any) -> pb.Empty:
        """An aggregating site's shard: after this round, or after an earlier one for those that lack it."""
        header = header_of(await first(parts), "share")
        site = self._site(context)
        require(site in self._sites, "site: does not aggregate", "PERMISSION_DENIED")
        index, state, run = self._sites.index(site), self._state(header.run), self._of(header.run)
        carried = run.now
        if carried is None or carried.attempt is not state.attempt:
            raise ProtocolError(CLOSED, "round: none is open")
        certificate: Any = certificate_of(context)
        shard_statements.check(certificate.public_key(), header.run, header.said, index)
        now = header.said.attempt == carried.header.attempt
        await self._check_said(state, carried, index, header, now)
        data = await self._take(carried, index, header, parts, farewell=now and carried.header.farewell > 0)
        lacking = set() if now else carried.asked.get(index, frozenset()) - {one.site for one in header.envelopes}
        if lacking:
            self.log("no-key", **carried.attempt.round.spec.where, by=site, sites=sorted(lacking))
        if data.size:
            run.held[index] = Held(header.said, {one.site: one.sealed for one in header.envelopes}, data)
        if now and not carried.done.is_set() and index not in carried.shared:
            carried.shared[index] = pb.ShareHeader(said=header.said, counts=header.counts)
            if len(carried.shared) == len(self._sites):
                await self._complete(state, carried)
        state.notify()
        return pb.Empty()

    async def _check_said(
        self, state: RunState, carried: Carried, index: int, header: pb.ShareHeader, now: bool
    ) -> None:
        """A site may say one thing about an attempt. A second one stops the run, and names the site."""
        said, before = header.said, self._signed.of_attempt(header.run, header.said.attempt)
        earlier = [before[index]] if before else []
        if now and index in carried.shared:
            earlier.append(shard_statements.fingerprint(header.run, carried.shared[index].said))
        if any(one != shard_statements.fingerprint(header.run, said) for one in earlier):
            error = Equivocation(self._sites[index], said.attempt)
            if not self._signed.stopped(header.run):
                await self.journalled(lambda: self._signed.keep(header.run, stopped=str(error)))
                self.log("stopped", run=header.run, reason=str(error))
            self._give_up(state, carried, str(error))
            raise error
        if now:
            spec = carried.attempt.round.spec
            whole = said.round == spec.round and bool(said.digest) is not bool(spec.farewell)
            require(whole, "shard: signed for another round, or without a digest")
            agreed = carried.decision == (said.members, said.senders)
            require(agreed, "members: not those that this round was settled with", CLOSED)
            received(header.counts, carried.header.counts)
            return
        wanted = carried.version and said.digest == carried.header.shards[index]
        require(bool(wanted), "shard: not of the model that the round starts from", CLOSED)

    async def _take(
        self, carried: Carried, index: int, header: pb.ShareHeader, parts: Parts, farewell: bool
    ) -> NDArray[np.uint8]:
        known = {one.site for one in header.envelopes} <= set(self.federation.site_names)
        require(known and len(header.envelopes) <= len(self.federation.sites), "envelopes: not of this federation")
        small = all(len(one.sealed) <= LARGEST_ENVELOPE for one in header.envelopes)
        require(small, f"envelopes: at most {LARGEST_ENVELOPE} bytes each")
        shard = masks.sizes(carried.header.parameters, len(self._sites), self._route.shares)[index]
        length = 0 if farewell else FLOAT32.nbytes(shard) + sealing.TAG
        require(header.length == length, f"length: {header.length} bytes, but this shard has {length}")
        data = np.empty(length, np.uint8)
        receiver = Receiver(data, header.digest, SEALED)
        try:
            async with asyncio.timeout(self.federation.deadline):
                async for part in parts:
                    receiver.feed(part)
        except TimeoutError:
            raise ProtocolError("DEADLINE_EXCEEDED", "shard: did not arrive in time") from None
        receiver.finish()
        self.metrics.moved("in", data.nbytes)
        return data

    async def _complete(self, state: RunState, carried: Carried) -> None:
        """All aggregating sites have answered: the digests of the new model are on the disk before anybody hears."""
        attempt, spec, decision = carried.attempt, carried.attempt.round.spec, carried.decision
        assert decision is not None
        shares = [received(carried.shared[index].counts, spec.counts) for index in range(len(self._sites))]
        result = pb.ReleaseHeader(phase=Phase.CLOSED, members=decision[0])
        members, senders = (attempt.cohort.of_bits(bits) for bits in decision)
        result.count = len(members)
        whole = [share for share in shares if share is not None]
        if senders and len(whole) == len(shares):
            result.counts, result.counted = sent(added(whole, spec.counts)), len(senders)
        if not spec.farewell:
            signed = [carried.shared[index].said for index in range(len(self._sites))]
            facts: dict[str, Any] = {"round": spec.round, "attempt": spec.attempt}
            facts["shards"] = [said.digest.hex() for said in signed]
            facts["said"] = [shard_statements.fingerprint(spec.run, said) for said in signed]
            await self.journalled(lambda: self._signed.keep(spec.run, **facts))
        carried.result, attempt.delivered, attempt.applied = result, True, members
        attempt.forget()
        carried.done.set()
        self.log("released", **spec.where, count=len(members), floor=attempt.round.least)

    def _of(self, run: str) -> Carrying:
        return self._runs.setdefault(run, Carrying())


def main() -> int:
    options = process.middleware_arguments("The mailbox of a federation whose sites aggregate or agree").parse_args()
    log = Log("mailbox")

    def make(federation: Federation) -> Middleware:
        kind = Letterbox if federation.route.carries_letters else Mailbox
        return kind(federation, Keyring(options.keys), options.state, log)

    return process.run("fl_privacy.wire.Middleware", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
