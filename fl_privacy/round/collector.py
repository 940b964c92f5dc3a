"""The server's end of a route with middleware: open, invite, and wait for the release.

The middleware's count decides; the sites' receipts are diagnostics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from fl_privacy.errors import RoundFailed
from fl_privacy.transcript.events import Event, Receipt
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc
from fl_privacy.wire.stream import digest

if TYPE_CHECKING:
    from fl_privacy.routes.base import Ask, ServerSeat

CALL = 60.0
RECEIPT_POLL = 1.0


class Collector:
    """One round at a time at every middleware of the route."""

    def __init__(self, seat: ServerSeat) -> None:
        self._federation, self._layout, self._sites = seat.federation, seat.layout, seat.sites
        self._stubs = [rpc.middleware(rpc.channel(address, seat.keys)) for address in seat.middleware]
        self._pool = ThreadPoolExecutor(len(self._stubs))

    def open(self, index: int, ask: Ask, length: int, model: Vector | None = None, layers: Sequence[int] = ()) -> None:
        """Open an attempt at one middleware; waits for one that is restarting, at most for a round's deadline."""
        config = self._federation
        terms: dict[str, Any] = {"cohort": len(ask.cohort), "quorum": ask.quorum(config), "sites": ask.cohort}
        terms |= {**ask.where, "counts": ask.counts, "farewell": ask.farewell, "best": ask.best}
        terms |= {"deadline": config.deadline, "seed": config.seed, "layout": self._layout.digest}
        if model is not None:
            terms |= {"model": digest(model), "parameters": model.size}
        header = pb.RoundHeader(**terms, length=length, layers=layers)
        stub, until = self._stubs[index], time.monotonic() + config.deadline
        client.patiently(lambda: client.open_round(stub, header, model, CALL), until)

    def collect(self, ask: Ask) -> tuple[list[client.Release], list[Event]]:
        """Invite the cohort and wait until the round is over at every middleware; releases, and the sites' receipts."""
        self._sites.invite(ask)
        request, timeout = pb.CollectRequest(**ask.where), self._federation.deadline + CALL
        calls = [stub.collect(request, timeout=timeout) for stub in self._stubs]
        futures = [self._pool.submit(client.collect, call, self._federation.coding) for call in calls]
        receipts, refused = list[Event](), set[str]()
        try:
            # If one of several aggregators is gone, do not wait for the others until the deadline.
            while wait(futures, RECEIPT_POLL, FIRST_EXCEPTION).not_done:
                for future in futures:
                    if future.done():
                        future.result()
                for site, status, _ in self._sites.answers(ask):
                    receipts.append(Receipt(name=site, status=status, time=time.time()))
                    if status != "done":
                        refused.add(site)
                if len(ask.cohort) - len(refused & set(ask.cohort)) < ask.quorum(self._federation):
                    raise RoundFailed(f"{len(refused)} of {len(ask.cohort)} sites refused or failed; see their logs")
            return [future.result() for future in futures], receipts
        finally:
            for call in calls:
                call.cancel()

    def settle(self, ask: Ask, commits: Sequence[bool]) -> None:
        """Let every aggregator apply the round, or drop it."""
        for stub, commit in zip(self._stubs, commits, strict=True):
            stub.settle(pb.SettleRequest(**ask.where, commit=commit), timeout=CALL)

    def finish(self, run: str) -> None:
        for stub in self._stubs:
            stub.finish(pb.FinishRequest(run=run), timeout=CALL)
