"""The site itself: its data, its keys and its model; trains, protects, uploads. Policy lives here, never in the FAB."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError, require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import OFF, Metrics
from fl_privacy.routes.base import SiteSeat, Ticket
from fl_privacy.steps.base import At, Seat
from fl_privacy.tasks.train import device as find_device
from fl_privacy.tasks.workload import Fit, Workload
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector

from .accounting import Account
from .outbox import Outbox
from .pipeline import Pipeline


class Site:
    """One site of a federation, alive for as long as its process."""

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
        metrics: Metrics = OFF,
        policy: str | None = None,
    ) -> None:
        self.federation, self.config = federation, federation.site(name)
        self.log, self.metrics, self.policy = log or Log(name), metrics, policy
        find_device(self.config.device)
        self._work = workload or Workload(federation, self.config.data or data_dir)
        self._data = self._work.site_data(name)
        self._steps = Pipeline(Seat(federation, name, self._work, len(self._data), state))
        self._account = Account(federation, name, state, self._steps.guard.charge)
        self._outbox = Outbox(state if self.private else None)
        # Opened for every record: in simulation a site moves from one process to another.
        self._truth = RunRecorder(truth, name, keys, reopen=True) if truth and federation.audit else None
        tier = self.config.tier if self.private else ""
        self._route = federation.route.site(SiteSeat(federation, self._work.layout, keys, middleware, tier, metrics))
        self.log("ready", records=len(self._data), parameters=self._work.layout.size)

    @property
    def parameters(self) -> int:
        return self._work.layout.size

    @property
    def private(self) -> bool:
        return self._steps.guard.charge is not None

    def take_part(self, ticket: Ticket, model: Vector | None = None) -> tuple[int, Payload | None]:
        """Take part in every round of the ticket; returns how many were done, and the reply through Flower."""
        check(ticket, self.federation)
        self.log("ticket", run=ticket.run, first=ticket.first, last=ticket.last, policy=self.policy)
        done = 0
        for at, start in self._route.rounds(ticket, model):
            payload = self.payload(at, start)
            self._route.deliver(at, payload)
            done += 1
            size = payload.nbytes
            self.metrics.ended("uploaded")
            self.metrics.moved("out", size)
            terms: dict[str, Any] = {"route": self.federation.route.kind, "bytes": size, "private": self.private}
            self.log("uploaded", **at.where, **terms, policy=self.policy)
        return done, self._route.reply()

    def payload(self, at: At, model: Vector) -> Payload:
        """What the site sends for an attempt: made once, charged once, and the same bytes when it is sent again."""
        try:
            with self._outbox.alone():
                payload = self._outbox.find(at)
                if payload is None:
                    self._account.check(at)
                    payload = self._make(at, model)
                    self._outbox.keep(at, payload)
                charged = self._account.charge(at)
        except FederationError as error:
            self.metrics.ended("not-sent")
            self.log("not-sent", **at.where, policy=self.policy, reason=str(error))
            raise
        if charged is not None:
            terms: dict[str, Any] = {"policy": self.policy, **self.budget()}
            self.log("charged" if charged else "resend", **at.where, **terms)
        return payload

    def _make(self, at: At, model: Vector) -> Payload:
        """Train, and run the update through the steps."""
        began = time.monotonic()
        private, clean = self._steps.guard.training(at) or (None, None)
        start = self._steps.inward(model, at)
        update = self._train(start, at, private)
        trained = time.monotonic()
        if self._truth is not None:
            honest = update if clean is None else self._train(start, at, clean)
            self._truth.record(**at.where, arrays={"update": honest})
        if self.config.behaviour is not None:
            update = self.config.behaviour.act(update, at)
        privatised = time.monotonic()
        payload = self._steps.outward(update, at)
        self.metrics.seconds("training", trained - began)
        self.metrics.seconds("privatising", time.monotonic() - privatised)
        return payload

    def _train(self, model: Vector, at: At, private: Fit | None) -> Vector:
        update = self._work.update(model, self._data, self.config.name, at.round, self.config.device, private)
        if not np.isfinite(update).all():
            raise FederationError("training: the update is not finite; lower task.train.lr")
        return update

    def budget(self) -> dict[str, float | None]:
        """Epsilon per round, spent over all runs, and left; None where nothing sets a limit."""
        return self._account.budget(self.metrics)


def check(ticket: Ticket, federation: Federation) -> None:
    """Accept only tickets of exactly this federation."""
    ours = ticket.federation == federation.digest
    require(ours, "ticket: for another federation config than this site's", "FAILED_PRECONDITION")
    first, last = ticket.first, ticket.last
    require(first <= last <= federation.rounds, f"ticket: rounds {first} to {last} are not in the run")
