"""The service that shuffler and aggregators share: open rounds, accept updates, serve models and mail."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import psutil
from numpy.typing import NDArray

from fl_privacy.coding import MAX_PARAMETERS, Coding, Payload
from fl_privacy.dp.witness import Statement
from fl_privacy.errors import ProtocolError, require
from fl_privacy.identity.keyring import certificate_of
from fl_privacy.identity.signing import fingerprint
from fl_privacy.round import opening, statements
from fl_privacy.round.access import Access
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.counted import Counted, received
from fl_privacy.round.journal import Entry
from fl_privacy.round.machine import SUPERSEDED, Phase, Round, RoundSpec, Submission
from fl_privacy.round.mailbox import Mailbox
from fl_privacy.round.rows import Rows
from fl_privacy.round.watching import watch
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import Part, Receiver, chunks, digest, header_of

if TYPE_CHECKING:
    pass

MAX_WAIT = 60.0
HEADER_WAIT = 30.0
MAX_RECORDS = 2**40
LARGEST_HEAD = 16 * 1024  # bytes

Parts = AsyncIterator[Part]
Offer = tuple[pb.RoundHeader, Payload | None]


class Middleware(Access, ABC):
    """The servicer; `prepare` and `hand_out` are where shuffler and aggregator differ."""

    blind: ClassVar[bool] = False  # it cannot read what it carries

    @abstractmethod
    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> NDArray[np.float32]:
        """The model of the round that is being opened."""

    @abstractmethod
    def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """What the server gets of a closed round."""

    @abstractmethod
    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.SettleReply:
        """What the server decided about a round that is over."""

    async def shard(self, request: pb.ShardRequest, context: Any) -> pb.ShardReply:
        raise ProtocolError("UNIMPLEMENTED", "shard: only aggregators have shards")

    async def seed(self, parts: Parts, context: Any) -> pb.Empty:
        raise ProtocolError("UNIMPLEMENTED", "seed: only aggregators are seeded")

    async def report(self, request: pb.ReportRequest, context: Any) -> pb.Empty:
        raise ProtocolError("UNIMPLEMENTED", "report: only a mailbox takes reports of aggregating sites")

    async def check(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        raise ProtocolError("UNIMPLEMENTED", "check: only mixes have their sums checked")

    async def relay(self, parts: Parts, context: Any) -> pb.Empty:
        raise ProtocolError("UNIMPLEMENTED", "relay: only mixes of onions pass batches on")

    async def share(self, parts: Parts, context: Any) -> pb.Empty:
        raise ProtocolError("UNIMPLEMENTED", "share: only a mailbox takes shards of aggregating sites")

    async def open(self, parts: Parts, context: Any) -> pb.Empty:
        """The server opens an attempt at a round, and may ask twice; an older attempt that is still open fails."""
        self._peer(context, "server")
        header = header_of(await first(parts), "round")
        spec = RoundSpec(**{field.name: getattr(header, field.name) for field in fields(RoundSpec)})
        longest = self.federation.deadline
        require(spec.deadline <= longest, f"deadline: {spec.deadline:g} s, but this federation has {longest:g}")
        agreed = self.federation.sites_evaluate or not spec.counts
        require(agreed, "counts: this federation's sites do not evaluate", "PERMISSION_DENIED")
        layers, cohort = self._layers(header), opening.cohort_of(header, self.federation)
        state = self._state(spec.run, create=True)
        self._check_own(state, context)
        if state.is_open(spec.attempt):
            return self._asked_again(state)
        model = await self.prepare(state, header, parts)
        caller, roster = fingerprint(certificate_of(context).public_key()), self.keys.roster()
        terms = opening.terms_of(header, cohort, self.model_digest(header, model), caller, self.federation, roster)
        if state.is_open(spec.attempt):  # by another call, while the model arrived
            return self._asked_again(state)
        spec, sites = self.collected_here(spec, cohort)
        organisations = {site: roster.organisation_of(site) for site in sites}
        round = Round(spec, self.federation.floor, time.monotonic(), organisations, self._divide)
        alone = f"sites: a tier of this cohort has fewer than {round.least} organisations; use route.buckets"
        require(round.hides(sites), alone)
        entry = Entry(spec.run, spec.round, spec.attempt, terms.model.hex(), spec.farewell > 0)
        await self.journalled(self.journal.open, entry)
        if state.attempt:
            state.attempt.fail("a newer attempt was opened")
            state.attempt.forget()
        signature = statements.sign(self.signing_key, statements.OPENED, spec.attempt, self.journal.id)
        coding = self.received(header)
        rows = Rows(spec.cohort, spec.length, coding)
        decoder = self.coding.decoder(model.size)
        attempt = Attempt(round, terms, cohort, signature, model, rows, Counted(spec.counts), decoder, coding, layers)
        attempt.parameters = header.parameters
        attempt.model_digest = digest(model) if header.shards else terms.model
        self.put_model(state, model, header.round - 1)
        await self.reopened(state, attempt)
        self.runs[spec.run] = state  # it may have given way to other runs while this was being opened
        state.attempt, state.finished, state.touched = attempt, False, time.monotonic()
        self.metrics.opened(1)
        task = asyncio.create_task(watch(attempt, self.metrics, self.log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        state.notify()
        self.log("opened", **spec.where, cohort=spec.cohort, quorum=spec.quorum, floor=round.floor)
        return pb.Empty()

    def _divide(self, clients: Sequence[str], organisations: Sequence[str], least: int) -> list[tuple[int, ...]]:
        """The sets that the route makes of these clients' updates."""
        return self.federation.route.together([self._tiers[name] for name in clients], organisations, least)

    def model_digest(self, header: pb.RoundHeader, model: NDArray[np.float32]) -> bytes:
        """The digest that stands for the model in the attempt's terms."""
        return bytes(header.model)  # `prepare` has compared it

    def collected_here(self, spec: RoundSpec, cohort: Cohort) -> tuple[RoundSpec, Sequence[str]]:
        """The sites of an attempt that send to us, and the round as it is for these."""
        return spec, cohort.sites

    def received(self, header: pb.RoundHeader) -> Coding:
        """How what each site sends us in an attempt travels."""
        return self.coding

    def signed_by(self, attempt: Attempt, client: str, header: pb.VectorHeader, context: Any) -> object:
        """What the site signs about its part, on routes where it does."""
        return None

    @abstractmethod
    async def reopened(self, state: RunState, attempt: Attempt) -> None:
        """An attempt is about to open; it may be one that was open before this process was restarted."""

    def _asked_again(self, state: RunState) -> pb.Empty:
        """The server opens an attempt that is open: with several of us, another one may have lost its updates."""
        if state.attempt and len(self.federation.route.middleware()) > 1:
            state.attempt.repeat()
            state.notify()
        return pb.Empty()

    def _layers(self, header: pb.RoundHeader) -> tuple[int, ...]:
        """Where each layer of an update ends, as it travels."""
        ends = tuple(header.layers)
        whole = not ends or (ends[0] >= 1 and self.coding.length(ends[-1]) == header.length)
        require(whole and list(ends) == sorted(set(ends)), "layers: not a division of the model")
        return ends

    async def submit(self, parts: Parts, context: Any) -> pb.SubmitReply:
        """A site's update: all or nothing, once."""
        client = self._site(context)
        header = header_of(await first(parts), "vector")
        attempt = self._attempt(header.run, header.round)
        require(header.dtype == attempt.coding.name, f"dtype: {header.dtype[:20]!r} is not {attempt.coding.name}")
        require(len(header.digest) == hashlib.sha256().digest_size, "digest: not a SHA-256")
        self._check_invited(attempt, client)
        require(header.tier == self._tiers[client], "tier: not the one that the federation has for this site")
        check_records(header.records, self.federation.combine.weights == "records" and not self.blind)
        counts = received(header.counts, attempt.round.spec.counts)
        require(len(header.head) <= LARGEST_HEAD, f"head: {len(header.head)} bytes are no signed head")
        # What was sent before is recognised by all of it.
        rest = header.counts + header.root
        whole = hashlib.sha256(header.digest + rest).digest() if rest else header.digest
        submission = Submission(header.attempt, header.layout, header.length, whole, max(1, header.floor))
        paper = self.signed_by(attempt, client, header, context)
        if header.ledger:
            await self._bear_witness(header.ledger, client, context)
        self._join(self._state(header.run), client)
        known = attempt.applied is not None and header.attempt == attempt.terms.name
        ticket = None if known else attempt.round.begin(client, submission, time.monotonic())
        attempt.repeated.add(client)
        if header.head and self.federation.audit:
            self._state(header.run).heads[client] = header.head
        if ticket is None:
            return pb.SubmitReply(duplicate=True)
        if attempt.first_at is None:
            attempt.first_at = time.monotonic()
        attempt.papers[client] = paper
        await self._receive(attempt, client, ticket, submission, header, parts)
        if counts is not None:
            attempt.counted.add(client, counts)
        attempt.notice()
        spec = attempt.round.spec
        self.log("accepted", run=spec.run, round=spec.round, count=len(attempt.round.accepted), cohort=spec.cohort)
        return pb.SubmitReply()

    async def _bear_witness(self, data: bytes, client: str, context: Any) -> None:
        """Keep the head of a site's ledger, before the update that was charged to it is accepted."""
        found = Statement.decode(data)
        own = (found.federation, found.site) == (self.federation.name, client)
        require(own, "statement of a ledger: of another site", "PERMISSION_DENIED")
        await self.journalled(self.witnesses.take, found, certificate_of(context).public_key())

    async def abstain(self, request: pb.AbstainRequest, context: Any) -> pb.Empty:
        """A site sends nothing in this attempt; nobody learns why, and the server only how many updates came."""
        client = self._site(context)
        attempt = self._attempt(request.run, request.round, request.attempt)
        self._check_invited(attempt, client)
        if attempt.applied is None:
            attempt.cut(client)
            attempt.round.abstain(client, request.attempt, time.monotonic())
            attempt.notice()
        attempt.repeated.add(client)
        return pb.Empty()

    def _check_invited(self, attempt: Attempt, client: str) -> None:
        uninvited = f"round: this site is not invited to round {attempt.round.spec.round}"
        require(client in attempt.cohort.sites, uninvited, "PERMISSION_DENIED")

    async def _receive(
        self, attempt: Attempt, client: str, ticket: int, submission: Submission, header: pb.VectorHeader, parts: Parts
    ) -> None:
        rows = attempt.rows
        if rows is None:
            raise ProtocolError("FAILED_PRECONDITION", f"round {attempt.round.spec.round} is over")
        receiver = Receiver(rows.take(client), header.digest, attempt.coding)
        attempt.cut(client)
        try:
            async with asyncio.timeout(None) as limit:
                attempt.streams[client] = limit
                async for part in parts:
                    attempt.round.check(client, ticket, time.monotonic())
                    receiver.feed(part)
                    assert isinstance(part, memoryview)  # nothing else is fed
                    attempt.taken += part.nbytes
            receiver.finish()
            if not attempt.round.spec.farewell:
                attempt.decoder.check(client, rows.take(client))
            attempt.round.commit(client, ticket, submission, time.monotonic())
            rows.label(client, header.tier, header.records)
        except TimeoutError:
            if not attempt.round.holds(client, ticket):
                raise ProtocolError("ABORTED", SUPERSEDED) from None
            raise ProtocolError("DEADLINE_EXCEEDED", f"round {attempt.round.spec.round}: the deadline passed") from None
        finally:
            if attempt.streams.get(client) is limit:
                del attempt.streams[client]
            if attempt.round.holds(client, ticket):
                attempt.round.abort(client, ticket)
                rows.drop(client)

    async def collect(self, request: pb.CollectRequest, context: Any) -> AsyncIterator[pb.Chunk | memoryview]:
        """The server's barrier: it answers when the round is over, never before."""
        attempt = self.asked(request, context)
        await attempt.over.wait()
        state = self._state(request.run)
        if attempt.round.phase is Phase.FAILED:
            self.log("failed", run=request.run, round=request.round, reason=attempt.round.reason)
            yield pb.Chunk(release=pb.ReleaseHeader(phase="failed", reason=attempt.round.reason))
            return
        async for part in self.hand_out(state, attempt):
            yield part

    async def fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Chunk | memoryview]:
        """A site waits for the next round and gets its model; the evaluator gets the newest model there is."""
        if request.newest:
            self._peer(context, "evaluator")
            state = self._state(request.run)
            version, model = await self.newest(state)
            header = pb.RoundHeader(run=request.run, round=version)
            header.digest = b"" if model is None else digest(model)
        else:
            site = self._site(context)
            state = self._state(request.run)
            self._join(state, site)
            header, model = await self._next_round(state, request, site)
        if model is not None:
            header.length = model.size
            if state.attempt is not None and not request.newest:
                state.attempt.given += model.nbytes
            else:
                self.metrics.moved("out", model.nbytes)
        for part in chunks(pb.Chunk(round=header), [] if model is None else [model]):
            yield part

    async def newest(self, state: RunState) -> tuple[int, NDArray[np.float32] | None]:
        """The newest model for the evaluator, and the round that it is after."""
        return state.version, state.model

    async def _next_round(self, state: RunState, request: pb.FetchRequest, site: str) -> Offer:
        until = time.monotonic() + min(max(0.0, request.wait), MAX_WAIT)  # 0 first: it stays where wait is NaN
        while not state.finished and not state.is_abandoned(time.monotonic()):
            if (found := await self.due(state, request, site)) is not None:
                return found
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await state.changed.wait()
            except TimeoutError:
                return pb.RoundHeader(run=state.name), None
        return pb.RoundHeader(run=state.name, finished=True), None

    async def due(self, state: RunState, request: pb.FetchRequest, site: str) -> Offer | None:
        """What the site is wanted for now, if anything."""
        attempt = state.attempt
        if attempt is None or not attempt.awaits(site) or not _wanted(attempt.round.spec, request):
            return None
        header = opening.offered(
            attempt, site, attempt.round.remaining(time.monotonic()), self.signing_key, self.journal
        )
        header.held = await asyncio.to_thread(attempt.decoder.held, site)
        header.witness.extend(found.encode() for found in self.witnesses.of(site))
        return header, attempt.model

    async def post(self, request: pb.Letter, context: Any) -> pb.Empty:
        """A site leaves a message for another site, or for all; the middleware cannot read it."""
        sender = self._site(context)
        known = request.recipient in ("", *self.federation.site_names)
        require(known, "recipient: no site of this federation", "NOT_FOUND")
        # A message keeps all bytes that it was read from, those of unknown fields too: only what is known is copied.
        facts = {name: getattr(request, name) for name in ("run", "recipient", "topic", "content")}
        state = self._state(request.run)
        state.mail.post(pb.Letter(sender=sender, **facts), time.monotonic())
        state.notify()
        return pb.Empty()

    async def pickup(self, request: pb.PickupRequest, context: Any) -> pb.Letters:
        """A site takes the messages that are for it."""
        site, mail = self._site(context), self._state(request.run).mail
        letters, last = mail.pickup(site, request.topic, time.monotonic(), request.after)
        return pb.Letters(letters=letters, last=last)

    async def finish(self, request: pb.FinishRequest, context: Any) -> pb.FinishReply:
        """The run is over: waiting sites are released and its memory is freed."""
        self._peer(context, "server")
        state = self._state(request.run)
        self._check_own(state, context)
        if state.attempt:
            state.attempt.fail("the run was finished")
        state.finished, state.attempt, state.model, state.mail = True, None, None, Mailbox()
        state.notify()
        self.log("finished", run=request.run)
        own = self.recorder.head(request.run) if self.recorder is not None else None
        return pb.FinishReply(heads=[*([own] if own else []), *state.heads.values()])

    async def take_model(self, state: RunState, length: int, wanted: bytes, parts: Parts) -> NDArray[np.float32]:
        """Read a model of that digest from the rest of a stream; one at a time per run."""
        require(1 <= length <= MAX_PARAMETERS, f"length: {length} is out of range")
        fits = 4 * length <= psutil.virtual_memory().total
        require(fits, f"length: no memory for a model of {length} numbers", "RESOURCE_EXHAUSTED")
        async with state.alone(self.federation.deadline):
            model = np.empty(length, np.float32)
            receiver = Receiver(model, wanted)
            async for part in parts:
                receiver.feed(part)
        receiver.finish()
        self.metrics.moved("in", model.nbytes)
        return model

    def put_model(self, state: RunState, model: NDArray[np.float32], version: int) -> None:
        state.model, state.version = model, version


def _wanted(spec: RoundSpec, request: pb.FetchRequest) -> bool:
    """A site that names the attempt it knows gets it again if its answer is missing: this process was restarted."""
    return spec.round > request.after_round or (spec.round == request.after_round and bool(request.after_attempt))


def check_records(records: int, wanted: bool) -> None:
    """How many records a site trained on is known where the federation weights updates by them, and nowhere else."""
    require(1 <= records <= MAX_RECORDS if wanted else not records, "records: not as the config says")


async def first(parts: Parts) -> Part:
    """The first part of a stream; refuses an empty stream and one that does not start in time."""
    try:
        async with asyncio.timeout(HEADER_WAIT):
            async for part in parts:
                return part
    except TimeoutError:
        raise ProtocolError("DEADLINE_EXCEEDED", "stream: no header arrived") from None
    raise ProtocolError("INVALID_ARGUMENT", "stream: empty")
