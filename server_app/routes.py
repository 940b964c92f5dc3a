"""The three ways a round can go: through Flower, through the shuffler, through the shard aggregators."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.shard import masks
from fl_privacy.transcript.events import Event, Receipt, rows_of
from fl_privacy.vector import Layout
from fl_privacy.wire import client, rpc
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import data_bytes, digest

from .nodes import Nodes

Vector = NDArray[np.float32]
CALL = 60.0
RECEIPT_POLL = 1.0


class RoundFailed(Exception):
    """This attempt gave nothing; another may be tried."""


@dataclass(frozen=True)
class Ask:
    """One attempt at one round."""

    run: str
    round: int
    last: int
    attempt: str
    cohort: list[str]
    invite: bool


@dataclass
class Outcome:
    """What the server received: updates and tiers on the routes that show it any, receipts, and bytes."""

    count: int
    updates: Vector | None = None
    tiers: list[str] = field(default_factory=list)
    receipts: list[Event] = field(default_factory=list)
    received: int = 0


class Route(Protocol):
    """A way for a round to go."""

    def play(self, ask: Ask, model: Vector | None) -> Outcome: ...

    def finish(self, run: str) -> None: ...


def attempt_name(run: str, round: int, model: Vector | None, cohort: list[str], number: int) -> str:
    """Digest of model and cohort, and of how often the round was tried: a new attempt is a new charge."""
    parts = [run, str(round), digest(model).hex() if model is not None else "", ",".join(cohort), str(number)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _ticket(federation: Federation, ask: Ask) -> dict[str, Any]:
    return {"run": ask.run, "federation": federation.digest, "first": ask.round, "last": ask.last}


class ThroughServer:
    """The baseline: updates come back in Flower's replies, and the server sees whose each is."""

    def __init__(self, federation: Federation, nodes: Nodes) -> None:
        self._federation, self._nodes = federation, nodes

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        assert model is not None
        packed = Array(dtype="<f4", shape=model.shape, stype="raw", data=bytes(data_bytes(model)))
        self._nodes.send(ask.cohort, _ticket(self._federation, ask), packed)
        until, updates, receipts, failed = time.monotonic() + self._federation.deadline, {}, [], 0
        while len(updates) + failed < len(ask.cohort) and time.monotonic() < until:
            for site, status, reply in self._nodes.receipts():
                receipts.append(Receipt(name=site, status=status, time=time.time()))
                update = _update_of(reply, model.size) if status == "done" else None
                if update is None:
                    failed += 1
                else:
                    updates[site] = update
            time.sleep(0.1)
        if len(updates) < self._federation.quorum:
            raise RoundFailed(f"{len(updates)} of {len(ask.cohort)} updates came, {self._federation.quorum} are needed")
        names = sorted(updates)
        matrix = np.stack([updates[name] for name in names])
        receipts += rows_of(names)
        tiers = [self._federation.site(name).tier for name in names]
        return Outcome(len(names), matrix, tiers, receipts, matrix.nbytes)

    def finish(self, run: str) -> None:
        """Nobody else to tell."""


def _update_of(reply: Any, size: int) -> Vector | None:
    record = reply.content.array_records.get("update")
    if record is None or "vector" not in record:
        return None
    data = record["vector"].data
    update = np.frombuffer(data, "<f4").astype(np.float32) if len(data) == 4 * size else None
    return update if update is not None and np.isfinite(update).all() else None


class _ByMiddleware:
    """Open, invite, and wait at Collect: what the middleware counted is true, receipts are diagnostics."""

    def __init__(self, federation: Federation, nodes: Nodes, layout: Layout, stubs: list[rpc.Stub]) -> None:
        self._federation, self._nodes, self._layout, self._stubs = federation, nodes, layout, stubs
        self._pool = ThreadPoolExecutor(len(stubs))
        self._refusals: set[str] = set()

    def _open(self, stub: rpc.Stub, header: pb.RoundHeader, model: Vector | None) -> None:
        """A middleware that is being started again is waited for, as long as a round may take."""
        until = time.monotonic() + self._federation.deadline
        client.patiently(lambda: client.open_round(stub, header, model, CALL), until)

    def _header(self, ask: Ask, length: int, model: bytes) -> pb.RoundHeader:
        return pb.RoundHeader(
            run=ask.run,
            round=ask.round,
            attempt=ask.attempt,
            cohort=len(ask.cohort),
            quorum=min(self._federation.quorum, len(ask.cohort)),
            deadline=self._federation.deadline,
            layout=self._layout.digest,
            length=length,
            seed=self._federation.seed,
            model=model,
            sites=ask.cohort,
        )

    def _collect(self, ask: Ask) -> tuple[list[client.Release], list[Event]]:
        if ask.invite:
            self._refusals.clear()
            self._nodes.send(ask.cohort, _ticket(self._federation, ask))
        request = pb.CollectRequest(run=ask.run, round=ask.round, attempt=ask.attempt)
        timeout = self._federation.deadline + CALL
        calls = [stub.collect(request, timeout=timeout) for stub in self._stubs]
        futures = [self._pool.submit(client.collect, call) for call in calls]
        receipts: list[Event] = []
        try:
            # With one of several aggregators gone the others would wait for the deadline.
            while wait(futures, RECEIPT_POLL, FIRST_EXCEPTION).not_done:
                for future in futures:
                    if future.done():
                        future.result()
                receipts += self._receipts()
                if len(ask.cohort) - len(self._refusals) < self._federation.quorum:
                    raise RoundFailed(
                        f"{len(self._refusals)} of {len(ask.cohort)} sites refused or failed; see their logs"
                    )
            return [future.result() for future in futures], receipts
        finally:
            for call in calls:
                call.cancel()

    def _receipts(self) -> list[Event]:
        found: list[Event] = []
        for site, status, _ in self._nodes.receipts():
            found.append(Receipt(name=site, status=status, time=time.time()))
            if status != "done":
                self._refusals.add(site)
        return found

    def finish(self, run: str) -> None:
        for stub in self._stubs:
            stub.finish(pb.FinishRequest(run=run), timeout=CALL)


class ThroughShuffler(_ByMiddleware):
    """Updates come mixed: the rows say nothing of who, when or in what order."""

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        assert model is not None
        header = self._header(ask, model.size, digest(model))
        header.layers.extend(part.stop for part in self._layout.layers)
        self._open(self._stubs[0], header, model)
        releases, receipts = self._collect(ask)
        release = releases[0]
        if release.updates is None:
            raise RoundFailed(release.reason or "the shuffler released nothing")
        return Outcome(release.count, release.updates, release.tiers, receipts, release.updates.nbytes)


class ThroughShards(_ByMiddleware):
    """The server sees phases, counts and metrics; either all aggregators settle a round or none does."""

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        owners = masks.owners(self._layout.size, len(self._stubs), self._federation.seed)
        sizes = np.bincount(owners, minlength=len(self._stubs))
        for stub, size in zip(self._stubs, sizes, strict=True):
            self._open(stub, self._header(ask, int(size), b""), None)
        releases, receipts = self._collect(ask)
        agreed = len({(r.phase, r.members) for r in releases}) == 1 and releases[0].phase == "closed"
        for stub in self._stubs:
            settle = pb.SettleRequest(run=ask.run, round=ask.round, attempt=ask.attempt, commit=agreed)
            stub.settle(settle, timeout=CALL)
        if not agreed:
            reasons = sorted({r.reason for r in releases if r.reason}) or [
                "the aggregators did not get the same updates"
            ]
            raise RoundFailed(reasons[0])
        return Outcome(releases[0].count, receipts=receipts)


def retryable(error: Exception) -> str | None:
    """Why another attempt may help, or None."""
    if isinstance(error, RoundFailed):
        return str(error)
    if isinstance(error, grpc.RpcError) and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,  # it was opened by a call that broke off
    ):
        return f"middleware: {error.code().name}"
    return None
