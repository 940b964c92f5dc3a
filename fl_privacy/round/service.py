"""What shuffler and aggregators have in common: rounds are opened, updates submitted, models fetched."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import MAX_PARAMETERS
from fl_privacy.errors import ProtocolError
from fl_privacy.identity.keyring import peer
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import OFF, Metrics
from fl_privacy.round.attempt import Attempt, RunState
from fl_privacy.round.machine import Phase, Round, RoundSpec, Submission
from fl_privacy.round.mailbox import Mailbox
from fl_privacy.round.rows import Rows
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import Part, Receiver, chunks, digest, header_of

if TYPE_CHECKING:
    from fl_privacy.config import Federation

MAX_RUNS = 8
MAX_WAIT = 60.0
HEADER_WAIT = 30.0
KEPT = 600.0  # seconds that a closed round waits for the server after its deadline; then its updates are dropped

Parts = AsyncIterator[Part]
_caller: ContextVar[str | None] = ContextVar("caller", default=None)  # whose call this task answers


class Middleware(ABC):
    """The servicer; `prepare` and `hand_out` are where shuffler and aggregator differ."""

    metrics: Metrics = OFF

    def __init__(self, federation: Federation, log: Log, recorder: RunRecorder | None = None) -> None:
        self.federation, self.coding = federation, federation.coding
        self.log = log
        self.recorder = recorder
        self.runs: dict[str, RunState] = {}
        self.released: set[str] = set()  # of all runs: a name is the server's choice, and a site resends the same bytes
        # A privatised update must say its budget: the server weighs it by that, and a bucket is made of it.
        bare = () if federation.unit is not None else ("",)
        self._tiers = {site.name: (site.tier, *bare) for site in federation.sites}
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def prepare(self, state: RunState, header: pb.RoundHeader, parts: Parts) -> NDArray[np.float32]:
        """The model of the round that is being opened."""

    @abstractmethod
    def hand_out(self, state: RunState, attempt: Attempt) -> AsyncIterator[pb.Chunk | memoryview]:
        """What the server gets of a closed round."""

    async def settle(self, request: pb.SettleRequest, context: Any) -> pb.Empty:
        raise ProtocolError("UNIMPLEMENTED", "settle: only aggregators settle rounds")

    async def seed(self, parts: Parts, context: Any) -> pb.Empty:
        raise ProtocolError("UNIMPLEMENTED", "seed: only aggregators are seeded")

    def refused(self, error: ProtocolError) -> None:
        """Called for every request that is turned away."""
        self.metrics.reject(error.code, str(error))
        self.log.rate_limited("refused", code=error.code, reason=str(error), own={"peer": _caller.get()})

    async def open(self, parts: Parts, context: Any) -> pb.Empty:
        """The server opens an attempt at a round; an older attempt that is still open fails."""
        self._peer(context, "server")
        header = header_of(await first(parts), "round")
        spec = RoundSpec(
            run=header.run,
            round=header.round,
            attempt=header.attempt,
            cohort=header.cohort,
            quorum=header.quorum,
            deadline=header.deadline,
            layout=header.layout,
            length=header.length,
            seed=header.seed,
        )
        if not self.federation.floor <= spec.cohort <= len(self.federation.sites):
            raise ProtocolError("INVALID_ARGUMENT", f"cohort: {spec.cohort} of {len(self.federation.sites)} sites")
        layers, invited = self._layers(header), self._invited(header)
        state = self._state(spec.run, create=True)
        self._check_new(spec)
        model = await self.prepare(state, header, parts)
        rows = Rows(spec.cohort, spec.length, self.coding)
        self._check_new(spec)  # others may have been opened, and released, while the model came
        if state.attempt:
            state.attempt.fail("a newer attempt was opened")
        self.put_model(state, model, header.round - 1)
        state.attempt = Attempt(Round(spec, self.federation.floor, time.monotonic()), rows, layers, invited)
        state.finished, state.touched = False, time.monotonic()
        self.metrics.opened(1)
        self._spawn(self._watch(state.attempt))
        state.notify()
        self.log(
            "opened",
            run=spec.run,
            round=spec.round,
            attempt=spec.attempt,
            cohort=spec.cohort,
            quorum=spec.quorum,
            floor=self.federation.floor,
        )
        return pb.Empty()

    def _peer(self, context: Any, role: str) -> str:
        """The caller's name, if it has this role."""
        name = peer(context, self.federation.name, role).name
        _caller.set(name)
        return name

    def _site(self, context: Any) -> str:
        """The calling site's name; a certificate outlives a site's membership."""
        name = self._peer(context, "site")
        if name not in self.federation.site_names:
            raise ProtocolError("PERMISSION_DENIED", f"site {name!r} is not in this federation")
        return name

    def _join(self, state: RunState, site: str) -> None:
        """Note a site's first call in a run. For our own operator: when a site came is nobody else's business."""
        if site not in state.joined:
            state.joined.add(site)
            self.log.own("joined", run=state.name, site=site)

    def _invited(self, header: pb.RoundHeader) -> frozenset[str]:
        names = frozenset(header.sites) or frozenset(self.federation.site_names)
        if not names <= set(self.federation.site_names) or len(names) < header.cohort:
            raise ProtocolError("INVALID_ARGUMENT", "sites: not a cohort of this federation")
        return names

    def _layers(self, header: pb.RoundHeader) -> tuple[int, ...]:
        """Where each layer of an update ends, as it travels."""
        ends = tuple(header.layers)
        if list(ends) != sorted(set(ends)) or (ends and (ends[0] < 1 or self.coding.length(ends[-1]) != header.length)):
            raise ProtocolError("INVALID_ARGUMENT", "layers: not a division of the model")
        return ends

    def _check_new(self, spec: RoundSpec) -> None:
        if spec.attempt in self.released:
            raise ProtocolError("ALREADY_EXISTS", "attempt: was released before; open a new one")
        if any(state.attempt and state.attempt.round.spec.attempt == spec.attempt for state in self.runs.values()):
            raise ProtocolError("ALREADY_EXISTS", "attempt: is open already")

    async def submit(self, parts: Parts, context: Any) -> pb.SubmitReply:
        """A site's update: all or nothing, once."""
        client = self._site(context)
        header = header_of(await first(parts), "vector")
        attempt = self._attempt(header.run, header.round)
        if header.dtype != self.coding.name:
            raise ProtocolError("INVALID_ARGUMENT", f"dtype: {header.dtype[:20]!r} is not {self.coding.name}")
        if len(header.digest) != hashlib.sha256().digest_size:
            raise ProtocolError("INVALID_ARGUMENT", "digest: not a SHA-256")
        if client not in attempt.invited:
            raise ProtocolError("PERMISSION_DENIED", f"round: {header.round} is not one this site is invited to")
        if header.tier not in self._tiers[client]:
            raise ProtocolError("INVALID_ARGUMENT", "tier: not the one that the federation has for this site")
        submission = Submission(header.attempt, header.layout, header.length, header.digest, max(1, header.floor))
        ticket = attempt.round.begin(client, submission, time.monotonic())
        self._join(self._state(header.run), client)
        if ticket is None:
            return pb.SubmitReply(duplicate=True)
        if attempt.first_at is None:
            attempt.first_at = time.monotonic()
        await self._receive(attempt, client, ticket, submission, header.tier, parts)
        attempt.notice()
        spec = attempt.round.spec
        self.log("accepted", run=spec.run, round=spec.round, count=len(attempt.round.accepted), cohort=spec.cohort)
        return pb.SubmitReply()

    async def _receive(
        self, attempt: Attempt, client: str, ticket: int, submission: Submission, tier: str, parts: Parts
    ) -> None:
        rows = attempt.rows
        if rows is None:
            raise ProtocolError("FAILED_PRECONDITION", f"round {attempt.round.spec.round} is over")
        receiver = Receiver(rows.take(client), submission.digest, self.coding)
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
            attempt.round.commit(client, ticket, submission, time.monotonic())
            rows.label(client, tier)
        except TimeoutError:
            if not attempt.round.holds(client, ticket):
                raise ProtocolError("ABORTED", "superseded by a newer submission of the same client") from None
            raise ProtocolError("DEADLINE_EXCEEDED", f"round {attempt.round.spec.round}: the deadline passed") from None
        finally:
            if attempt.streams.get(client) is limit:
                del attempt.streams[client]
            if attempt.round.holds(client, ticket):
                attempt.round.abort(client, ticket)
                rows.drop(client)

    async def collect(self, request: pb.CollectRequest, context: Any) -> AsyncIterator[pb.Chunk | memoryview]:
        """The server's barrier: answers when the round is over, never before."""
        self._peer(context, "server")
        attempt = self._attempt(request.run, request.round)
        if attempt.round.spec.attempt != request.attempt:
            raise ProtocolError("FAILED_PRECONDITION", "attempt: not the one that is open")
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
            header = pb.RoundHeader(run=request.run, round=state.version, model=state.model_digest)
        else:
            site = self._site(context)
            state = self._state(request.run)
            self._join(state, site)
            header = await self._next_round(state, request, site)
        if state.model is not None and (header.round or request.newest) and not header.finished:
            header.model = state.model_digest
            header.length = state.model.size
            arrays = [state.model]
            if state.attempt is not None and not request.newest:
                state.attempt.given += state.model.nbytes
            else:
                self.metrics.moved("out", state.model.nbytes)
        else:
            arrays = []
        for part in chunks(pb.Chunk(round=header), arrays):
            yield part

    async def _next_round(self, state: RunState, request: pb.FetchRequest, site: str) -> pb.RoundHeader:
        until = time.monotonic() + min(max(0.0, request.wait), MAX_WAIT)  # 0 first: it stays where wait is NaN
        while not state.finished and not state.is_abandoned(time.monotonic()):
            attempt = state.attempt
            if attempt and attempt.awaits(site) and _wanted(attempt.round.spec, request):
                spec = attempt.round.spec
                return pb.RoundHeader(
                    run=spec.run,
                    round=spec.round,
                    attempt=spec.attempt,
                    cohort=spec.cohort,
                    quorum=spec.quorum,
                    deadline=attempt.round.remaining(time.monotonic()),
                    layout=spec.layout,
                    seed=spec.seed,
                    layers=attempt.layers,
                )
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                    await state.changed.wait()
            except TimeoutError:
                return pb.RoundHeader(run=state.name)
        return pb.RoundHeader(run=state.name, finished=True)

    async def post(self, request: pb.Letter, context: Any) -> pb.Empty:
        """A site leaves a message for another, or for all; what is in it is none of ours."""
        request.sender = self._site(context)
        if request.recipient and request.recipient not in self.federation.site_names:
            raise ProtocolError("NOT_FOUND", "recipient: no site of this federation")
        self._state(request.run).mail.post(request, time.monotonic())
        return pb.Empty()

    async def pickup(self, request: pb.PickupRequest, context: Any) -> pb.Letters:
        """A site takes the messages that are for it."""
        site = self._site(context)
        mail = self._state(request.run).mail
        return pb.Letters(letters=mail.pickup(site, request.topic, time.monotonic()))

    async def finish(self, request: pb.FinishRequest, context: Any) -> pb.Empty:
        """The run is over: waiting sites go home and its memory is freed."""
        self._peer(context, "server")
        state = self._state(request.run)
        if state.attempt:
            state.attempt.fail("the run was finished")
        state.finished, state.attempt, state.model, state.mail = True, None, None, Mailbox()
        state.notify()
        self.log("finished", run=request.run)
        return pb.Empty()

    async def take_model(self, length: int, wanted: bytes, parts: Parts) -> NDArray[np.float32]:
        """Read a model of that digest from the rest of a stream."""
        if not 1 <= length <= MAX_PARAMETERS:
            raise ProtocolError("INVALID_ARGUMENT", f"length: {length} is out of range")
        model = np.empty(length, np.float32)
        receiver = Receiver(model, wanted)
        async for part in parts:
            receiver.feed(part)
        receiver.finish()
        self.metrics.moved("in", model.nbytes)
        return model

    def put_model(self, state: RunState, model: NDArray[np.float32], version: int) -> None:
        state.model, state.model_digest, state.version = model, digest(model), version

    async def _watch(self, attempt: Attempt) -> None:
        try:
            await self._see_out(attempt)
        except asyncio.CancelledError:
            attempt.round.fail("the process was stopped")
            raise
        finally:
            self._ended(attempt)

    async def _see_out(self, attempt: Attempt) -> None:
        """Let the deadline pass; drop the updates of a closed round that nobody comes for."""
        while not attempt.over.is_set():
            attempt.round.tick(time.monotonic())
            attempt.notice()
            with_slack = attempt.round.remaining(time.monotonic()) + 0.001
            try:
                async with asyncio.timeout(with_slack):
                    await attempt.over.wait()
            except TimeoutError:
                continue
        self._account(attempt)
        try:
            # From the deadline on: until then another aggregator may still be collecting the same round.
            async with asyncio.timeout(attempt.round.remaining(time.monotonic()) + KEPT):
                await attempt.gone.wait()
        except TimeoutError:
            attempt.fail("nobody collected it in time")

    def _account(self, attempt: Attempt) -> None:
        """Bytes and times of a round that is over. Not before: a scraper must not see updates arrive one by one."""
        now, opened = time.monotonic(), attempt.round.opened_at
        first = attempt.first_at or now
        self.metrics.opened(-1)
        self.metrics.seconds("waiting", first - opened)
        self.metrics.seconds("receiving", now - first)
        self.metrics.moved("in", attempt.taken)
        self.metrics.moved("out", attempt.given)

    def _ended(self, attempt: Attempt) -> None:
        """Count how it ended, and say what was not released and why."""
        round = attempt.round
        self.metrics.ended("released" if attempt.delivered else "failed")
        if not attempt.delivered:
            self.log(
                "not-released",
                run=round.spec.run,
                round=round.spec.round,
                attempt=round.spec.attempt,
                count=len(round.accepted),
                floor=round.needed,
                reason=round.reason or "it broke off while it was being released",
            )

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _state(self, run: str, create: bool = False) -> RunState:
        if run in self.runs:
            return self.runs[run]
        if not create:
            raise ProtocolError("NOT_FOUND", "run: not known here")
        if not 0 < len(run) <= 128:
            raise ProtocolError("INVALID_ARGUMENT", "run: a name of 1 to 128 characters is needed")
        idle = [name for name, state in self.runs.items() if state.attempt is None or state.attempt.round.is_over]
        for name in idle[: max(0, len(self.runs) - MAX_RUNS + 1)]:
            del self.runs[name]
        if len(self.runs) >= MAX_RUNS:
            raise ProtocolError("RESOURCE_EXHAUSTED", f"run: {MAX_RUNS} runs are open already")
        self.runs[run] = RunState(run)
        return self.runs[run]

    def _attempt(self, run: str, round: int) -> Attempt:
        attempt = self._state(run).attempt
        if attempt is None or attempt.round.spec.round != round:
            raise ProtocolError("NOT_FOUND", f"round: {round} is not open")
        return attempt


def _wanted(spec: RoundSpec, request: pb.FetchRequest) -> bool:
    if spec.round == request.after_round:
        return bool(request.after_attempt) and spec.attempt != request.after_attempt
    return spec.round > request.after_round


async def first(parts: Parts) -> Part:
    """The first part of a stream; an empty stream is refused, and one that does not begin."""
    try:
        async with asyncio.timeout(HEADER_WAIT):
            async for part in parts:
                return part
    except TimeoutError:
        raise ProtocolError("DEADLINE_EXCEEDED", "stream: no header came") from None
    raise ProtocolError("INVALID_ARGUMENT", "stream: empty")
