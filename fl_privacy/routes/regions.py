"""The server's end of route `hierarchical`: it collects a sum from every region that is there, and needs the quorum."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np

from fl_privacy.combine import limbs
from fl_privacy.errors import ProtocolError, RoundFailed, require
from fl_privacy.round.collector import CALL, Collector
from fl_privacy.round.member import GRACE
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat
from fl_privacy.routes.hierarchical import COUNT, EXACT, SUM, mean_of
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc
from fl_privacy.wire.client import explain

if TYPE_CHECKING:
    from fl_privacy.routes.hierarchical import HierarchicalRoute

Result = TypeVar("Result")
CLOSED = "FAILED_PRECONDITION"  # a region has closed the attempt for good


class Regions(Collector):
    """One round at a time at the regions that take part in it; one that is gone or refuses fails by itself."""

    def __init__(self, route: HierarchicalRoute, seat: ServerSeat) -> None:
        super().__init__(seat, tolerant=True)
        form, size = route.form(seat.federation), seat.layout.size
        self._form, self._most = form, limbs.longest(size) if form is EXACT else size
        self.chosen: tuple[int, ...] = ()
        self._wait = 0.0  # seconds for a region that does not answer

    @property
    def asked(self) -> Sequence[rpc.Stub]:
        return [self._stubs[index] for index in self.chosen]

    def receive(self, call: Any) -> client.Release:
        return client.collect_sum(call, self._form, self._most)

    def opened(
        self, ask: Ask, chosen: Sequence[int], length: int, model: Vector, wait: float
    ) -> dict[int, grpc.RpcError | None]:
        """Open an attempt at these regions side by side, within so many seconds; the error of each that does not."""
        self._wait = wait
        calls = {index: self._pool.submit(self.open, index, ask, length, model) for index in chosen}
        return {index: _error(call) for index, call in calls.items()}

    def finish(self, run: str) -> list[bytes]:
        """A region that is gone must not keep the sites of the others waiting."""
        heads = list[bytes]()
        for stub in self._stubs:
            with suppress(grpc.RpcError):
                heads += map(bytes, stub.finish(pb.FinishRequest(run=run), timeout=CALL).heads)
        return heads

    def _patiently(self, call: Any) -> Any:
        return client.patiently(call, time.monotonic() + self._wait)

    def _spared(self, call: Callable[[], Result]) -> Result | None:
        return call()

    def _released(self, future: Future[client.Release]) -> client.Release:
        try:
            return future.result()
        except (grpc.RpcError, ProtocolError) as error:
            return client.Release("failed", explain(error) if isinstance(error, grpc.RpcError) else str(error))


def _error(call: Future[None]) -> grpc.RpcError | None:
    error = call.exception()
    if error is not None and not isinstance(error, grpc.RpcError):
        raise error
    return error


class AtServer:
    """The server sees a sum and a count of every region, and no update."""

    def __init__(self, route: HierarchicalRoute, seat: ServerSeat) -> None:
        self._federation, self._size, self._names = seat.federation, seat.layout.size, route.middleware()
        self._members = [frozenset(sites) for sites in route.members(seat.federation)]
        self._organisation = {site.name: site.organisation or site.name for site in seat.federation.sites}
        self._round = Regions(route, seat)
        self.confirm, self.finish = self._round.confirm, self._round.finish

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        from fl_privacy.wire.stream import digest

        assert model is not None
        return digest(model)

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        assert model is not None
        self._round.chosen = self._open(ask, model)
        releases, receipts = self._round.collect(ask)
        outcome, sums, counts, missing = Outcome(0, receipts=receipts), list[Any](), list[int](), list[str]()
        shared = np.zeros((len(self._names), ask.counts), np.uint64)
        for index, release in zip(self._round.chosen, releases, strict=True):
            try:
                there = len(self._members[index] & set(ask.cohort))
                check(release, self._federation.floor, there, ask.counts, 0 if ask.farewell else self._size)
            except ProtocolError as error:
                missing.append(f"{self._names[index]}: {error}")
                continue
            outcome.count += release.count
            if release.counts is not None:
                shared[index], outcome.counted = release.counts, outcome.counted + release.counted
            if not ask.farewell:
                assert release.rows is not None
                sums.append(release.rows)
                counts.append(release.count)
                outcome.seen |= {SUM + self._names[index]: release.rows}
                outcome.seen |= {COUNT + self._names[index]: np.array([release.count])}
                outcome.received += release.rows.nbytes
        self._check_quorum(ask, outcome.count, missing)
        if outcome.counted:
            outcome.counts, outcome.seen["counts"] = shared.sum(axis=0, dtype=np.uint64), shared
        if sums:
            outcome.mean = mean_of(sums, counts, self._size)
            outcome.noted["regions"] = len(sums)
        return outcome

    def _open(self, ask: Ask, model: Vector) -> tuple[int, ...]:
        """The regions at which the attempt is open. One that falls short of the floor is not asked."""
        cohort, least = set(ask.cohort), self._federation.floor
        own = [members & cohort for members in self._members]
        chosen = [k for k, sites in enumerate(own) if len({self._organisation[site] for site in sites}) >= least]
        length, deadline = 0 if ask.farewell else self._federation.coding.length(self._size), self._federation.deadline
        spare = [k for k in chosen if len(cohort) - len(own[k]) >= ask.terms.quorum]  # the round can do without each
        errors = self._round.opened(ask, [k for k in chosen if k not in spare], length, model, deadline)
        errors |= self._round.opened(ask, spare, length, model, min(GRACE, deadline))
        found = tuple(index for index in chosen if errors[index] is None)
        failed = {self._names[index]: error for index, error in errors.items() if error is not None}
        closed = any(error.code().name == CLOSED for error in failed.values())
        reasons = [f"{name}: {explain(error)}" for name, error in failed.items()]
        self._check_quorum(ask, sum(len(own[index]) for index in found), reasons, closed)
        return found

    def _check_quorum(self, ask: Ask, count: int, reasons: Sequence[str], closed: bool = False) -> None:
        if count < ask.terms.quorum or not count:
            few = f"regions have {count} of {len(ask.cohort)} sites, {ask.terms.quorum} are needed"
            raise RoundFailed("; ".join([few, *reasons]), ask.terms.number + closed)

    def copies(self, ask: Ask) -> int:
        return len(self._names)


def check(release: client.Release, least: int, most: int, counts: int, parameters: int) -> None:
    """Refuse what no region of `most` sites can have added up; without parameters, it was not asked for a sum."""
    require(release.phase == "released", release.reason or "it released nothing")
    require(least <= release.count <= most, f"count: {release.count} of {most} sites, with a floor of {least}")
    if release.counts is not None:
        good = release.counts.size == counts and least <= release.counted <= release.count
        require(good, "counts: not those that were asked for")
    if not parameters:
        return
    data = release.rows
    assert data is not None  # of a region that released, it was received
    if data.dtype == EXACT.type:
        limbs.unpacked(data, parameters, release.count)
    else:
        require(data.size == parameters, f"sum: {data.size} numbers for {parameters} parameters", "DATA_LOSS")
