"""The server's end of route `mixes`: it settles on what all mixes have, and adds up their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from fl_privacy.errors import ProtocolError, RoundFailed, require
from fl_privacy.mix import shares
from fl_privacy.mix.shares import Residues
from fl_privacy.rns.residues import unpack
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.collector import Collector
from fl_privacy.round.settlement import Decision, Intersection
from fl_privacy.round.terms import sized
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat
from fl_privacy.routes.mixes import SEED_BYTES
from fl_privacy.scores.shares import added
from fl_privacy.vector import Vector
from fl_privacy.wire import client, rpc
from fl_privacy.wire.client import counts_in, explain

if TYPE_CHECKING:
    from fl_privacy.routes.mixes import ByMixes

PROBE = 5.0  # seconds for a mix to say that it is there


class Mixes(Collector):
    """One attempt at a time, at the mixes that take part in it."""

    def __init__(self, seat: ServerSeat, stages: int) -> None:
        super().__init__(seat, stages=stages)
        self.chosen: tuple[int, ...] = tuple(range(len(self._stubs)))
        route: Any = seat.federation.route
        self._most = route.most_given(seat.federation, seat.layout.size)
        self._health = [rpc.Stub(rpc.channel(address, seat.keys, whom), rpc.HEALTH) for address, whom in seat.peers]

    @property
    def asked(self) -> Sequence[rpc.Stub]:
        return [self._stubs[index] for index in self.chosen]

    def receive(self, call: Any) -> client.Release:
        return client.collect_sum(call, most=self._most)

    def sums(self, ask: Ask) -> list[client.Release]:
        """What every mix hands out of a settled round."""
        from fl_privacy.wire import federation_pb2 as pb

        request = pb.CollectRequest(**ask.where)
        calls = [stub.collect(request, timeout=self._patience) for stub in self.asked]
        try:
            return [future.result() for future in [self._pool.submit(self.receive, call) for call in calls]]
        finally:
            for call in calls:
                call.cancel()

    def here(self) -> set[int]:
        """The mixes that answer."""
        return {index for index, stub in enumerate(self._health) if _answers(stub)}


def _answers(stub: rpc.Stub) -> bool:
    try:
        stub.check(health_pb2.HealthCheckRequest(), timeout=PROBE)
    except grpc.RpcError:
        return False
    return True


class AtServer:
    """The server sees who was counted, the sum of every mix, and what these add up to."""

    def __init__(self, route: ByMixes, seat: ServerSeat) -> None:
        self._route, self._federation, self._size = route, seat.federation, seat.layout.size
        self._coding = route.coding(seat.federation)
        self._columns = route.columns(seat.federation, self._size)
        self._round = Mixes(seat, stages=2 if route.checked else 1)
        self.finish = self._round.finish

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        from fl_privacy.wire.stream import digest

        assert model is not None
        return sized(digest(model), self._size)

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        self._round.chosen = self._route.taking_part(ask.terms.number, ask.farewell)
        try:
            return self._play(ask, model)
        except ProtocolError as error:
            raise RoundFailed(f"a mix said what nobody can read: {error}", ask.terms.number + 1) from None
        except grpc.RpcError as error:
            number = 0
            if (
                self._route.needed < self._route.mixes
                and not ask.farewell
                and error.code() is grpc.StatusCode.UNAVAILABLE
            ):
                number = self._route.next_number(ask.terms.number, self._round.here())
            if not number:
                raise
            raise RoundFailed(f"{explain(error)}; the next attempt does without a mix", number) from None

    def _play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.wire.stream import digest

        assert model is not None
        carrier, shards = self._round.chosen[0], [digest(model)]
        data = self._route.data_mix(ask.terms.number, ask.round)
        whole = self._route.share_length(self._federation, self._size)
        for index in self._round.chosen:
            length = 0 if ask.farewell else whole if index == data else SEED_BYTES
            given = model if index == carrier else None
            self._round.open(index, ask, length, given, shards=shards, parameters=self._size, also=self._also(ask))
        releases, receipts = self._round.collect(ask)
        decision = self._decided(releases, ask.terms.quorum)
        replies = self._round.settle(ask, [decision] * len(releases))
        outcome = Outcome(decision.updates, receipts=receipts)
        shared = [counts for reply in replies if reply and (counts := counts_in(reply.counts)) is not None]
        if len(shared) == len(replies):
            outcome.counts, outcome.counted = added(shared, ask.counts), min(r.counted for r in replies if r)
            outcome.seen = {"counts": np.stack(shared)}
        if not ask.farewell:
            settled = Cohort(ask.cohort, ask.salt).of_bits(decision.members)
            self._add(ask, outcome, model, settled)
        return outcome

    def _also(self, ask: Ask) -> Mapping[str, Any]:
        """What else the mixes, and by them the sites, have to know of an attempt."""
        return {}

    def _decided(self, releases: Sequence[client.Release], quorum: int) -> Decision:
        """What all mixes have; one that was settled before a crash of another hands out the same members again."""
        closed = [
            client.Release(**{**vars(one), "phase": "closed"}) if one.phase == "released" else one for one in releases
        ]
        decision = Intersection().decide(closed, quorum)[0]
        if decision.problem:
            raise RoundFailed(decision.problem.replace("aggregator", "mix"))
        if self._route.needed < self._route.mixes and decision.senders != decision.members:
            return decision._replace(senders=bytes(len(decision.members)))  # counts of some members only stay here
        return decision

    def _add(self, ask: Ask, outcome: Outcome, model: Vector, settled: Sequence[str]) -> None:
        """Every mix's sum is recorded as it came; together they decode to the sum of the updates."""
        releases = self._round.sums(ask)
        names = [f"mix-{index}" for index in self._round.chosen]
        for name, release in zip(names, releases, strict=True):
            if release.rows is None:
                raise RoundFailed(release.reason or f"{name} gave no sum")
            outcome.seen[f"sum-{name}"] = release.rows
            outcome.received += release.rows.nbytes
        outputs = {
            name: self._readable(ask, name, release.rows, outcome.count)
            for name, release in zip(names, releases, strict=True)
        }
        self._verify(ask, outcome, outputs, releases, settled)
        sums = shares.added(outputs.values(), self._coding.moduli) if len(outputs) > 1 else outputs[names[0]]
        own = sums[:, : self._coding.columns(self._size)]
        try:
            summed = self._coding.decode_sum(own, outcome.count, self._coding.bound_at(model))
        except ProtocolError as error:
            reason = f"{error}; a site sent a share of no update, or a mix whose sum is not checked altered it"
            raise RoundFailed(reason, ask.terms.number + 1) from None
        outcome.mean = (summed.total / np.float32(outcome.count)).astype(np.float32)
        outcome.noted["clamped"] = float(f"{summed.clamped:.3g}")

    def _verify(
        self,
        ask: Ask,
        outcome: Outcome,
        outputs: dict[str, Residues],
        releases: Sequence[client.Release],
        settled: Sequence[str],
    ) -> None:
        """Have the sums checked, if the route says so."""

    def _readable(self, ask: Ask, mix: str, data: Any, count: int) -> Residues:
        try:
            return self._read(data, count)
        except ProtocolError as error:
            raise RoundFailed(f"{mix}: its sum cannot be read ({error})", ask.terms.number + 1) from None

    def _read(self, data: Any, count: int) -> Residues:
        """A mix's sum as residues: packed, or in the published form one 64-bit number for each."""
        if self._coding.form == "carry-safe":
            return unpack(data, self._coding.moduli, self._columns)
        moduli = self._coding.moduli
        require(data.size == 2 * len(moduli) * self._columns, "sum: not one number per residue", "DATA_LOSS")
        sums: Residues = np.ascontiguousarray(data).view("<u8").reshape(len(moduli), self._columns)
        most = [count * (m - 1) for m in moduli]
        good = all(int(row.max()) <= top for row, top in zip(sums, most, strict=True))
        require(good, "sum: larger than residues of so many sites add up to", "DATA_LOSS")
        return sums

    def confirm(self, ask: Ask) -> None:
        self._round.confirm(ask)

    def copies(self, ask: Ask) -> int:
        return 1
