"""The server's end of a route with middleware: open, invite, and wait for the release.

The middleware's count decides; the sites' receipts are diagnostics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from fl_privacy.errors import RoundFailed
from fl_privacy.round.settlement import Decision
from fl_privacy.transcript.events import Event, Receipt
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc

if TYPE_CHECKING:
    from fl_privacy.routes.ends import Ask, ServerSeat

Result = TypeVar("Result")
CALL = 60.0
RECEIPT_POLL = 1.0


class Collector:
    """One round at a time at every middleware of the route."""

    def __init__(self, seat: ServerSeat, tolerant: bool = False, everyone: bool = False, stages: int = 1) -> None:
        """Tolerant: a round goes on without a middleware that is gone. Everyone: sites outside the cohort must be there
        too. A round has so many stages with a deadline each.
        """
        self._everyone, self._patience = everyone, stages * seat.federation.deadline + CALL
        self._federation, self._sites, self._tolerant = seat.federation, seat.sites, tolerant
        self._stubs = [rpc.middleware(rpc.channel(address, seat.keys, whom)) for address, whom in seat.peers]
        self._pool = ThreadPoolExecutor(len(self._stubs))

    @property
    def asked(self) -> Sequence[rpc.Stub]:
        """The middleware that takes part in the attempt."""
        return self._stubs

    def receive(self, call: Any) -> client.Release:
        """What a middleware hands out when the round is over."""
        return client.collect(call, self._federation.coding)

    def open(
        self,
        index: int,
        ask: Ask,
        length: int,
        model: Vector | None = None,
        layers: Sequence[int] = (),
        shards: Sequence[bytes] = (),
        parameters: int = 0,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        """Open an attempt at one middleware; waits for one that is restarting, at most for a round's deadline.

        `also` are further fields of the header.
        """
        config = self._federation
        terms: dict[str, Any] = {**vars(ask.terms), "attempt": ask.attempt, "sites": ask.cohort, "salt": ask.salt}
        terms |= {"deadline": config.deadline, "seed": config.seed, "shards": shards}
        terms["parameters"] = parameters if model is None else model.size
        header = pb.RoundHeader(**terms, length=length, layers=layers, **(also or {}))
        self._spared(partial(self._patiently, partial(client.open_round, self._stubs[index], header, model, CALL)))

    def shards(self, run: str, round: int, known: Sequence[bytes] = ()) -> list[bytes]:
        """The digest of every aggregator's shard of the model after a round; of one that is gone, the last known."""
        request, found = pb.ShardRequest(run=run, round=round), list[bytes]()
        for index, stub in enumerate(self._stubs):
            reply = self._spared(partial(self._patiently, partial(stub.shard, request, timeout=CALL)))
            if reply is None and index >= len(known):
                raise RoundFailed(f"aggregator-{index} is not reachable, and its shard is not known yet")
            found += [known[index]] if reply is None else list(reply.shards) or [bytes(reply.digest)]
        return found

    def collect(self, ask: Ask) -> tuple[list[client.Release], list[Event]]:
        """Invite the cohort and wait until the round is over at every middleware; releases, and the sites' receipts."""
        invited = replace(ask, cohort=list(self._federation.site_names)) if self._everyone else ask
        self._sites.invite(invited)
        request = pb.CollectRequest(**ask.where)
        calls = [stub.collect(request, timeout=self._patience) for stub in self.asked]
        futures = [self._pool.submit(self.receive, call) for call in calls]
        receipts, absent = list[Event](), set[str]()
        try:
            # If one of several aggregators is gone, do not wait for the others, unless the round can do without it.
            until = ALL_COMPLETED if self._tolerant else FIRST_EXCEPTION
            while wait(futures, RECEIPT_POLL, until).not_done:
                for future in futures:
                    if future.done():
                        self._released(future)
                for site, status, _ in self._sites.answers(invited):
                    receipts.append(Receipt(name=site, status=status, time=time.time()))
                    if status != "done":
                        absent.add(site)
                if len(ask.cohort) - len(absent & set(ask.cohort)) < ask.terms.quorum:
                    raise RoundFailed(f"{len(absent)} of {len(ask.cohort)} sites do not take part; see their logs")
            return [self._released(future) for future in futures], receipts
        finally:
            for call in calls:
                call.cancel()

    def settle(self, ask: Ask, decisions: Sequence[Decision]) -> list[pb.SettleReply | None]:
        """Let every middleware apply the round as decided, or drop it; None from one that is gone or refuses."""
        replies = []
        for stub, (members, senders, problem) in zip(self.asked, decisions, strict=True):
            request = pb.SettleRequest(**ask.where, commit=not problem, members=members, senders=senders)
            replies.append(self._spared(partial(stub.settle, request, timeout=CALL)))
        return replies

    def confirm(self, ask: Ask) -> None:
        """What was released is on our disk. If a middleware does not hear of it, it forgets the round in time."""
        for stub in self.asked:
            with suppress(grpc.RpcError):
                stub.settle(pb.SettleRequest(**ask.where), timeout=CALL)

    def finish(self, run: str) -> list[bytes]:
        replies = [stub.finish(pb.FinishRequest(run=run), timeout=CALL) for stub in self._stubs]
        return [bytes(head) for reply in replies for head in reply.heads]

    def _released(self, future: Future[client.Release]) -> client.Release:
        """What a middleware released; if it is gone and that is tolerated, that it failed."""
        found = self._spared(future.result)
        return client.Release("failed", "an aggregator is gone") if found is None else found

    def _spared(self, call: Callable[[], Result]) -> Result | None:
        """The result of a call to a middleware; None if it fails and the round can do without it."""
        try:
            return call()
        except grpc.RpcError:
            if not self._tolerant:
                raise
            return None

    def _patiently(self, call: Any) -> Any:
        return client.patiently(call, time.monotonic() + self._federation.deadline)
