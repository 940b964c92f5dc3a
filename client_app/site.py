"""The site itself: its data, its keys and its model; trains, protects, uploads. Policy lives here, never in the FAB."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fl_privacy import models
from fl_privacy.agreement.secret import Secrets, Seeded
from fl_privacy.behaviours import Scene
from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError, ProtocolError, reason_of, require
from fl_privacy.identity.keyring import Keyring
from fl_privacy.models.initial import initial
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import LOCAL, OFF, Metrics
from fl_privacy.round.agreeing import Agreeing, terms_of
from fl_privacy.round.sent import Sent
from fl_privacy.round.terms import FAREWELLS
from fl_privacy.routes.ends import SiteSeat, Ticket, no_head, peers
from fl_privacy.scores.form import Counts
from fl_privacy.steps.base import At, Seat
from fl_privacy.tasks.train import Diverged, device as find_device
from fl_privacy.tasks.workload import Fit, Workload
from fl_privacy.transcript.events import filed
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector
from fl_privacy.wire import rpc
from fl_privacy.wire.client import explain

from .accounting import Account
from .canaries import Canaries
from .evaluation import Evaluation
from .moment import Moment
from .outbox import Outbox, Parcel
from .own_policy import OwnPolicy
from .pipeline import Pipeline

WAIT = 0.7  # of a round's deadline: how long it waits for the sites' agreement


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
        policy: OwnPolicy | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """`secrets`: how the sites agree on one, where it is not over the route's mailbox."""
        self.federation, self.config = federation, federation.site(name)
        self.log, self.metrics = log or Log(name), metrics
        self._policy = policy or OwnPolicy(federation, name, state, self.log)
        find_device(self.config.device)
        if federation.init is not None and federation.route.needs_all_sites:
            federation.init.check("init")
        self._work, self._shared = workload or Workload(federation, self.config.data or data_dir), workload is not None
        records = self._work.site_data(name)
        self._work.check_model(records)
        self._data = Canaries(federation, name, records, state)
        if federation.agrees and federation.reproducible:
            secrets = Seeded(federation.seed, lambda: terms_of(keys.roster()))
        elif federation.agrees and secrets is None and state is not None:
            secrets = agreeing(federation, name, keys, middleware, state, self.log)
        seat = Seat(federation, name, self._work, self._data.expected, state, secrets)
        self._steps, self._evaluation = Pipeline(seat), Evaluation(seat)
        charges = self._steps.guard.charge, self._evaluation.charge
        self._account = Account(federation, name, state, *charges, keys, self._policy.limits)
        self._outbox = Outbox(state if self.private else None)
        # Opened for every record: in simulation a site moves from one process to another.
        self._state = state
        self._truth = RunRecorder(truth, name, keys, reopen=True) if truth and federation.audit else None
        tier = self.config.tier if self.private else ""
        place = SiteSeat(
            federation=federation,
            layout=self._work.layout,
            keys=keys,
            middleware=middleware,
            site=name,
            tier=tier,
            floor=self._policy.floor,
            sent=Sent(state),
            metrics=metrics,
            head=self._truth.head if self._truth else no_head,
            ledger=self._account,
            records=self._data.expected if federation.combine.weights == "records" else 0,
            state=state,
            initial=partial(initial, federation),
            log=self.log,
            stamp=self._steps.stamp,
        )
        self._route, self._moment = federation.route.site(place), Moment(state, federation.deadline)
        self.log("ready", records=self._data.expected, parameters=self._work.layout.size)

    @property
    def largest_model(self) -> int:
        """Bytes that may come with a ticket: none where models come from the middleware."""
        return 0 if self.federation.route.long_tickets else 4 * self._work.layout.size

    @property
    def policy(self) -> str | None:
        """The digest of the policy in force."""
        return self._policy.sha256

    @property
    def private(self) -> bool:
        return self._steps.guard.charge is not None

    def take_part(self, ticket: Ticket, model: Vector | None = None) -> tuple[int, Payload | None]:
        """Take part in every round of the ticket; returns how many were done, and the reply through Flower."""
        check(ticket, self.federation)
        self.log("ticket", run=ticket.run, first=ticket.first, last=ticket.last, policy=self.policy)
        done = 0
        for at, start in self._route.rounds(ticket, model):
            began = time.monotonic()
            try:
                self._policy.check(at, self._account.adopt)
                self._route.admit(at, start)
                self._round(at, start)
            except ProtocolError as error:
                self._abstain(at, began, error.code, str(error))
            except grpc.RpcError as error:
                self._abstain(at, began, error.code().name, explain(error))
            except Exception as error:  # of any code that trains here: the worker survives it, and the round ends early
                self._abstain(at, began, LOCAL, reason_of(error))
            else:
                done += 1
                if not at.farewell:
                    self._moment.learn(time.monotonic() - began)
        return done, self._route.reply()

    def _round(self, at: At, start: Vector) -> None:
        """Make what the site sends for an attempt, and send it."""
        parcel = self.parcel(at, start)
        if at.farewell:
            self._compare(at, late=False)
        self._route.deliver(at, *(part for part in parcel if part is not None))
        size = parcel.payload.nbytes
        self.metrics.ended("uploaded")
        self.metrics.moved("out", size)
        terms: dict[str, Any] = {"route": self.federation.route.kind, "bytes": size, "private": self.private}
        self.log("uploaded", **at.where, **terms, evaluated=parcel.counts is not None, policy=self.policy)
        if at.farewell:
            self._compare(at, late=True)

    def _abstain(self, at: At, began: float, code: str, reason: str) -> None:
        """Send nothing in this attempt. The reason stays here, and the time does not tell it: a refusal, a spent budget
        and an error are all reported when an update would have come."""
        self.metrics.ended("not-sent")
        self.metrics.reject(code, reason)
        self.log("not-sent", **at.where, policy=self.policy, reason=reason)
        self._moment.wait(began)
        self._route.abstain(at)

    def parcel(self, at: At, model: Vector) -> Parcel:
        """What the site sends for an attempt: made once, charged once, and the same bytes when it is sent again."""
        with self._outbox.alone():
            parcel = self._outbox.find(at)
            if parcel is None:
                self._account.check(at)
                parcel = self._make(at, self._steps.inward(model, at, self._route.held()))
                self._outbox.keep(at, parcel)
            charged = self._account.charge(at, parcel.counts is not None)
        if charged is not None:
            terms: dict[str, Any] = {"policy": self.policy, **self.budget()}
            self.log("charged" if charged else "resend", **at.where, **terms)
        return parcel

    def keep(self, model: Vector, at: At) -> None:
        """The models of a farewell stay on the site's own disk: first the final one, then the best one."""
        whiches: dict[models.Which, bool] = {"last": at.round == at.farewell + 1, "best": at.best == at.farewell}
        for which, is_it in whiches.items():
            if self._state is not None and is_it:
                models.keep(self._state / "models", at.run, which, at.farewell, model, self._work.layout)

    def _make(self, at: At, model: Vector) -> Parcel:
        """Evaluate the model; train it, unless this is the farewell."""
        counts = self._evaluate(at, model)
        recorded = {} if counts is None else {"counts": counts}
        if not at.farewell:
            return Parcel(self._update(at, model, recorded), counts)
        self.keep(model, at)
        if self._truth is not None and recorded:
            self._truth.record(**filed(at), arrays=recorded)
        return Parcel(np.empty(0, self.federation.coding.type), counts)

    def _evaluate(self, at: At, model: Vector) -> Counts | None:
        """The counts of the model, if they are due; a round does not fail for want of them."""
        try:
            if not self._evaluation.due(at):
                return None
            self._account.check_evaluation(at)
            with self.metrics.phase("evaluating"):
                return self._evaluation.counts(at, model)
        except Exception as error:
            self.log("not-evaluated", **at.where, policy=self.policy, reason=reason_of(error))
            return None

    def _compare(self, at: At, late: bool) -> None:
        """Train a model alone for comparison: before the counts are sent if that is quick, otherwise afterwards.

        On one machine, sites share its cores and end with the run. Simulated sites wait for each other.
        """
        rounds = self._evaluation.rounds_alone(at.run)
        expected, limit = rounds * self._work.seconds * len(self.federation.sites), self.federation.deadline / 4
        if not rounds or late != (not 0 < expected < limit):
            return
        try:
            if self._shared and late:
                raise FederationError(f"it would take {expected:.0f} s for all sites; set evaluate.alone to false")
            with self.metrics.phase("comparing"):
                self._evaluation.compare(at.run, self._data.records(at.run), rounds)
        except Exception as error:
            self.log("not-compared", run=at.run, policy=self.policy, reason=reason_of(error))

    def _update(self, at: At, start: Vector, recorded: dict[str, Any]) -> Payload:
        """Train, and run the update through the steps; `recorded` is what the truth has besides the update."""
        began = time.monotonic()
        private, clean = self._steps.guard.training(at) or (None, None)
        update = self._train(start, at, private)
        trained = time.monotonic()
        if self._truth is not None:
            honest = update if clean is None else self._train(start, at, clean)
            known = {**recorded, **self._data.truth(at.run), **self._steps.truth(at)}
            self._truth.record(**filed(at), arrays={"update": honest, **known})
        if self.config.behaviour is not None:
            update = self.config.behaviour.sent(update, at, self._scene(start, at))
        privatised = time.monotonic()
        payload = self._steps.outward(update, at)
        for slot, notes in self._steps.notes().items():
            self.log("step", **at.where, step=slot, **notes)
        self.metrics.seconds("training", trained - began)
        self.metrics.seconds("privatising", time.monotonic() - privatised)
        return payload

    def _train(self, model: Vector, at: At, private: Fit | None) -> Vector:
        data, name, device = self._data.records(at.run), self.config.name, self.config.device
        if self.config.behaviour is not None:
            data = self.config.behaviour.records(data, self._scene(model, at))
        try:
            update = self._work.update(model, data, name, at.round, device, private)
            if not np.isfinite(update).all():
                raise Diverged("training: the update is not finite; lower task.train.lr")
        except Diverged as error:
            if not self.private:
                raise
            # The server chooses the model: an abstention would say without noise whether it diverges here.
            self.log("diverged", **at.where, policy=self.policy, reason=str(error))
            return np.zeros_like(model)
        return update

    def _scene(self, model: Vector, at: At) -> Scene:
        """What a misbehaving site knows; those that collude read each other's records."""

        def honest(site: str) -> Vector:
            return self._work.update(model, self._work.site_data(site), site, at.round, self.config.device, None)

        return Scene(self.federation, self.config.name, honest, model, self._work)

    def budget(self) -> dict[str, float | None]:
        """Epsilon per round, spent over all runs, and left; None where nothing sets a limit."""
        return self._account.budget(self.metrics)


def agreeing(
    federation: Federation, name: str, keys: Keyring, middleware: list[str], state: Path, log: Log
) -> Agreeing:
    """The site's part in the agreement of its roster, from now on."""
    ((address, whom), *_) = peers(federation, middleware)

    def dial() -> rpc.Stub:
        return rpc.middleware(rpc.channel(address, keys, whom))

    wait = WAIT * federation.deadline
    return Agreeing(federation.name, name, keys, state, dial, wait, log).start()


def check(ticket: Ticket, federation: Federation) -> None:
    """Accept only tickets of exactly this federation."""
    ours = ticket.federation == federation.digest
    require(ours, "ticket: for another federation config than this site's", "FAILED_PRECONDITION")
    first, last = ticket.first, ticket.last
    require(first <= last <= federation.rounds + FAREWELLS, f"ticket: rounds {first} to {last} are not in the run")
