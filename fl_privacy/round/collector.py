"""The server's end of a route with middleware: open, invite, and wait for the release.

The middleware's count decides; the sites' receipts are diagnostics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from fl_privacy.errors import RoundFailed
from fl_privacy.transcript.events import Event, Receipt
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc

if TYPE_CHECKING:
    from fl_privacy.routes.base import Ask, ServerSeat

CALL = 60.0
RECEIPT_POLL = 1.0


class Collector:
    """One round at a time at every middleware of the route."""

    def __init__(self, seat: ServerSeat) -> None:
        self._federation, self._sites = seat.federation, seat.sites
        self._stubs = [rpc.middleware(rpc.channel(address, seat.keys, whom)) for address, whom in seat.peers]
        self._pool = ThreadPoolExecutor(len(self._stubs))

    def open(
        self,
        index: int,
        ask: Ask,
        length: int,
        model: Vector | None = None,
        layers: Sequence[int] = (),
        shards: Sequence[bytes] = (),
    ) -> None:
        """Open an attempt at one middleware; waits for one that is restarting, at most for a round's deadline."""
        config = self._federation
        terms: dict[str, Any] = {**vars(ask.terms), "attempt": ask.attempt, "sites": ask.cohort, "salt": ask.salt}
        terms |= {"deadline": config.deadline, "seed": config.seed, "shards": shards}
        if model is not None:
            terms["parameters"] = model.size
        header = pb.RoundHeader(**terms, length=length, layers=layers)
        self._patiently(lambda: client.open_round(self._stubs[index], header, model, CALL))

    def shards(self, run: str, round: int) -> list[bytes]:
        """The digest of every aggregator's shard of the model after a round."""
        request = pb.ShardRequest(run=run, round=round)
        return [
            bytes(self._patiently(lambda stub=stub: stub.shard(request, timeout=CALL)).digest) for stub in self._stubs
        ]

    def collect(self, ask: Ask) -> tuple[list[client.Release], list[Event]]:
        """Invite the cohort and wait until the round is over at every middleware; releases, and the sites' receipts."""
        self._sites.invite(ask)
        request, timeout = pb.CollectRequest(**ask.where), self._federation.deadline + CALL
        calls = [stub.collect(request, timeout=timeout) for stub in self._stubs]
        futures = [self._pool.submit(client.collect, call, self._federation.coding) for call in calls]
        receipts, absent = list[Event](), set[str]()
        try:
            # If one of several aggregators is gone, do not wait for the others until the deadline.
            while wait(futures, RECEIPT_POLL, FIRST_EXCEPTION).not_done:
                for future in futures:
                    if future.done():
                        future.result()
                for site, status, _ in self._sites.answers(ask):
                    receipts.append(Receipt(name=site, status=status, time=time.time()))
                    if status != "done":
                        absent.add(site)
                if len(ask.cohort) - len(absent & set(ask.cohort)) < ask.terms.quorum:
                    raise RoundFailed(f"{len(absent)} of {len(ask.cohort)} sites do not take part; see their logs")
            return [future.result() for future in futures], receipts
        finally:
            for call in calls:
                call.cancel()

    def settle(self, ask: Ask, commit: bool, members: bytes = b"", senders: bytes = b"") -> list[pb.SettleReply]:
        """Let every middleware apply the round, or drop it."""
        request = pb.SettleRequest(**ask.where, commit=commit, members=members, senders=senders)
        return [stub.settle(request, timeout=CALL) for stub in self._stubs]

    def confirm(self, ask: Ask) -> None:
        """What was released is on our disk. If a middleware does not hear of it, it forgets the round in time."""
        with suppress(grpc.RpcError):
            self.settle(ask, commit=True)

    def finish(self, run: str) -> list[bytes]:
        replies = [stub.finish(pb.FinishRequest(run=run), timeout=CALL) for stub in self._stubs]
        return [bytes(head) for reply in replies for head in reply.heads]

    def _patiently(self, call: Any) -> Any:
        return client.patiently(call, time.monotonic() + self._federation.deadline)
