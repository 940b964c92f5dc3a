"""The site itself: its data, its keys and its model; trains, protects, uploads. Policy lives here, never in the FAB."""

from __future__ import annotations

import math
import time
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Dpsgd, Federation, ServerRoute, ShardsRoute
from fl_privacy.dp.gaussian import LARGEST_EPSILON
from fl_privacy.dp.sampled import Private
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import OFF, Metrics
from fl_privacy.shard import masks
from fl_privacy.tasks.train import device as find_device
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.wire import client, rpc
from fl_privacy.wire import federation_pb2 as pb

from .outgoing import Outgoing
from .ticket import Ticket

POLL = 20.0  # seconds a fetch waits at the middleware before it asks again
CALL = 60.0  # seconds a call may take beyond the waiting

Array = NDArray[np.float32]


class Site:
    """One site of a federation, alive for as long as its process."""

    metrics: Metrics = OFF
    policy: str | None = None  # SHA-256 of the policy file in force

    def __init__(
        self,
        federation: Federation,
        name: str,
        keys: Keyring,
        middleware: list[str],
        data_dir: Path | None = None,
        truth: Path | None = None,
        state: Path | None = None,
        workload: Workload | None = None,
        log: Log | None = None,
    ) -> None:
        self.federation = federation
        self.config = federation.site(name)
        self.log = log or Log(name)
        find_device(self.config.device)
        self._work = workload or Workload(federation, self.config.data or data_dir)
        self._data = self._work.site_data(name)
        if isinstance(federation.privatise, Dpsgd):
            self._work.check_records()
        self._outgoing = Outgoing(federation, name, state, len(self._data))
        self._stubs = [rpc.middleware(rpc.channel(address, keys)) for address in middleware]
        self._owners: masks.Owners | None = None
        self._cut: Array | None = None
        self._whole: Array | None = None
        self._truth = RunRecorder(truth, name, keys, reopen=True) if truth and federation.audit else None
        self.log("ready", records=len(self._data), parameters=self._work.layout.size)

    @property
    def parameters(self) -> int:
        return self._work.layout.size

    def check(self, ticket: Ticket) -> None:
        """Only tickets of this very federation are honoured."""
        if ticket.federation != self.federation.digest:
            raise ProtocolError("FAILED_PRECONDITION", "ticket: of another federation config than this site's")
        if ticket.last < ticket.first or ticket.last > self.federation.rounds:
            raise ProtocolError(
                "INVALID_ARGUMENT", f"ticket: rounds {ticket.first} to {ticket.last} are not in the run"
            )

    def _took(self, ticket: Ticket) -> None:
        self.log("ticket", run=ticket.run, first=ticket.first, last=ticket.last, policy=self.policy)

    def answer(self, ticket: Ticket, model: Array) -> Array:
        """Route `server`: the model came with the ticket, and the update goes back the same way."""
        self.check(ticket)
        if not isinstance(self.federation.route, ServerRoute):
            raise ProtocolError("PERMISSION_DENIED", "ticket: this federation's updates do not go to the server")
        if model.shape != self._work.initial.shape or not np.isfinite(model).all():
            raise ProtocolError("INVALID_ARGUMENT", "model: not of this federation's layout, or not finite")
        self._took(ticket)
        update = self._update(ticket.run, ticket.first, "", model)
        self._uploaded(ticket.run, ticket.first, "", update)
        return update

    def take_part(self, ticket: Ticket) -> int:
        """Fetch every round of the ticket as it opens, train, upload; returns how many were done."""
        self.check(ticket)
        if isinstance(self.federation.route, ServerRoute):
            raise ProtocolError("INVALID_ARGUMENT", "ticket: came without a model")
        self._took(ticket)
        done, seen = 0, pb.RoundHeader(round=ticket.first - 1)
        until = time.monotonic() + self.federation.deadline
        while time.monotonic() < until and (header := self._next(ticket.run, seen, until)) is not None:
            if header[0].round > ticket.last:
                break
            seen = header[0]
            self._one_round(seen, header[1])
            done += 1
            until = time.monotonic() + self.federation.deadline
            if seen.round == ticket.last:
                break
        return done

    def _next(self, run: str, seen: pb.RoundHeader, until: float) -> tuple[pb.RoundHeader, Array] | None:
        """The next round that all of the middleware agrees on, and its model; None when the run is over."""
        while time.monotonic() < until:
            with self.metrics.phase("fetching"):
                answers = [self._fetch(stub, run, seen, until) for stub in self._stubs]
            self.metrics.moved("in", sum(model.nbytes for _, model in answers if model is not None))
            if any(header.finished for header, _ in answers):
                return None
            if all(header.round for header, _ in answers) and len({h.attempt for h, _ in answers}) == 1:
                return answers[0][0], self._join([model for _, model in answers])
        return None

    def _fetch(
        self, stub: rpc.Stub, run: str, seen: pb.RoundHeader, until: float
    ) -> tuple[pb.RoundHeader, Array | None]:
        wait = max(0.0, min(POLL, until - time.monotonic()))
        request = pb.FetchRequest(run=run, after_round=seen.round, after_attempt=seen.attempt, wait=wait)
        # A middleware that was restarted does not know the run until the server opens its next round.
        return client.patiently(lambda: client.fetch(stub, request, wait + CALL), until, grpc.StatusCode.NOT_FOUND)

    def _one_round(self, header: pb.RoundHeader, model: Array) -> None:
        layout = self._work.layout
        if header.layout != layout.digest or model.size != layout.size:
            raise ProtocolError("INVALID_ARGUMENT", "layout: the round is of another model than this site's task")
        if tuple(header.layers) != tuple(part.stop for part in layout.layers) and len(self._stubs) == 1:
            raise ProtocolError("INVALID_ARGUMENT", "layers: not those of this site's model")
        until = time.monotonic() + header.deadline
        update = self._update(header.run, header.round, header.attempt, model)
        with self.metrics.phase("uploading"):
            for stub, part in zip(self._stubs, self._split(update), strict=True):
                self._submit(stub, header, part, until)
        self._uploaded(header.run, header.round, header.attempt, update)

    def _submit(self, stub: rpc.Stub, header: pb.RoundHeader, part: Array, until: float) -> None:
        def send() -> bool:
            left = max(1.0, until - time.monotonic())
            return client.submit(stub, header, part, left, self._outgoing.tier, self.federation.floor)

        client.patiently(send, until)

    def _update(self, run: str, round: int, attempt: str, model: Array) -> Array:
        """What leaves the site for an attempt."""
        began, trained = time.monotonic(), 0.0

        def fit(private: Private | None) -> Array:
            return self._work.update(model, self._data, self.config.name, round, self.config.device, private)

        def train(private: Private | None = None) -> Array:
            nonlocal trained
            started = time.monotonic()
            update = fit(private)
            trained = time.monotonic() - started
            if not np.isfinite(update).all():
                raise FederationError("training: the update is not finite; lower task.train.lr")
            if self._truth is not None:
                self._record(run, round, attempt, update if private is None else fit(private.clean))
            return update

        try:
            update = self._outgoing.prepare(run, round, attempt, train)
        except FederationError as error:
            self.metrics.ended("not-sent")
            self.log("not-sent", run=run, round=round, attempt=attempt, policy=self.policy, reason=str(error))
            raise
        self.metrics.seconds("training", trained)
        self.metrics.seconds("privatising", time.monotonic() - began - trained)
        self._account(run, round, attempt)
        return update

    def budget(self) -> dict[str, float | None]:
        """Epsilon spent over all runs, and what the policy leaves; None where it sets no limit."""
        ledger = self._outgoing.ledger
        if ledger is None:
            return {}
        spent, limited = ledger.spent(), ledger.epsilon < LARGEST_EPSILON
        self.metrics.budget(spent, max(0.0, ledger.epsilon - spent) if limited else math.inf)
        left = max(0.0, ledger.epsilon - spent) if limited else None
        return {"spent": spent, "left": left, "delta": ledger.delta}

    def _account(self, run: str, round: int, attempt: str) -> None:
        """Tell what the ledger says of an update that is ready to be sent."""
        if self._outgoing.ledger is not None:
            event = "charged" if self._outgoing.charged else "resend"
            terms = {"epsilon": self.config.epsilon, "policy": self.policy, **self.budget()}
            self.log(event, run=run, round=round, attempt=attempt, **terms)

    def _uploaded(self, run: str, round: int, attempt: str, update: Array) -> None:
        self.metrics.ended("uploaded")
        self.metrics.moved("out", update.nbytes)
        route, private = self.federation.route.kind, self._outgoing.ledger is not None
        terms = {"attempt": attempt, "route": route, "bytes": update.nbytes, "private": private, "policy": self.policy}
        self.log("uploaded", run=run, round=round, **terms)

    def _record(self, run: str, round: int, attempt: str, update: Array) -> None:
        assert self._truth is not None
        self._truth.record(run, round, attempt or "server", {"update": update})

    def _split(self, update: Array) -> list[Array]:
        if not isinstance(self.federation.route, ShardsRoute):
            return [update]
        # Fresh vectors would be faulted in page by page every round; these two are used again.
        self._cut = np.empty_like(update) if self._cut is None else self._cut
        return masks.split(update, self._shard_owners(), self.federation.route.aggregators, out=self._cut)

    def _join(self, models: list[Array | None]) -> Array:
        whole = [model for model in models if model is not None]
        if len(whole) != len(models):
            raise ProtocolError("DATA_LOSS", "model: the middleware sent none")
        if not isinstance(self.federation.route, ShardsRoute):
            return whole[0]
        self._whole = np.empty(self.parameters, np.float32) if self._whole is None else self._whole
        return masks.join(whole, self._shard_owners(), out=self._whole)

    def _shard_owners(self) -> masks.Owners:
        if self._owners is None:
            assert isinstance(self.federation.route, ShardsRoute)
            self._owners = masks.owners(self._work.layout.size, self.federation.route.aggregators, self.federation.seed)
        return self._owners
