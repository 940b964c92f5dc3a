"""The round loop: cohort, round, combine, record, evaluate, checkpoint."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import grpc
from flwr.serverapp import Grid

from fl_privacy.config import Federation
from fl_privacy.deploy.parties import serving
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.errors import FederationError, LaunchError, RoundFailed
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.models.initial import initial
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import Metrics, serve as serve_metrics
from fl_privacy.round.best import Best
from fl_privacy.round.checkpoints import Arrays, Checkpoints
from fl_privacy.routes.ends import Ask, Held, Outcome, ServerSeat
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript import RunWriter, ViewWriter
from fl_privacy.transcript.events import VOID, Clustered, Decision, Event, Farewell, Invited, filed
from fl_privacy.transcript.files import read_log
from fl_privacy.transcript.run import METRICS
from fl_privacy.wire import rpc
from fl_privacy.wire.client import explain

from .asking import Asking
from .evaluation import AtSites, Evaluation, Local, Remote
from .invitations import Invitations
from .nodes import Nodes
from .scoreboard import Scoreboard
from .statement import Statement
from .strategy import MODEL, Models, Strategy

PAUSE = 1.0
MOMENT, KEPT = "moment.", "kept."  # of arrays in a checkpoint that are no models
# Already there: it was opened by a call that broke off.
CLOSED = "FAILED_PRECONDITION"  # a middleware has closed the attempt for good
PASSING = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "NOT_FOUND", "ALREADY_EXISTS", CLOSED}


class Coordinator:
    """One run, from its first round or its last checkpoint to its end."""

    def __init__(self, grid: Grid, plan: ServerPlan) -> None:
        self.plan = plan
        # Flower does not pass on what a ServerApp prints, so the events have their own file.
        self.log = Log("server", plan.log, plan.events)
        self.metrics = self._make_metrics()
        self.federation = Federation.load(plan.config)
        self.layout = layout_of(self.federation)
        self.strategy = Strategy(self.federation)
        self.nodes = Nodes(grid, self.federation)
        rounds = 1 if plan.invite_every_round else self.federation.rounds_per_ticket
        waits = self.federation.route.long_tickets and not plan.invite_every_round
        self.invitations = Invitations(self.nodes, self.federation, rounds, waits, self.log)
        self.keys = Keyring(plan.keys)
        place = self.federation, self.layout, self.keys, plan.middleware, self.invitations
        own: dict[str, Any] = {"views": plan.run_dir / "views", "initial": partial(initial, self.federation)}
        own |= {"holders": lambda: self.strategy.holders, "made": lambda: self.strategy.made}
        seat = ServerSeat(*place, held=lambda: Held(self.models, self.kept), **own)
        self.route = self.federation.route.server(seat)
        self.evaluation = self._make_evaluation()
        # With shards the server holds no model, so it cannot leak one.
        self.models: Models = self.evaluation.initial
        self.kept: Arrays = {}  # by the route
        self.checkpoints = Checkpoints(plan.run_dir / "checkpoints")
        self.done = max(self.checkpoints.rounds(), default=0)
        self.best, self.early = Best(self.federation.stop), ""
        self.statement = Statement(self.federation, plan, self.layout, self.done)
        key, certificate = load_key(self.keys.key_file), self.keys.certificate_file.read_bytes()
        self.run = RunWriter(plan.run_dir, self.statement.begin(), key, certificate)
        self.view = ViewWriter(plan.run_dir / "views" / "server", "server", plan.run, key, certificate, self.run.nonce)
        self.board = Scoreboard(self.run, self.log, read_log(plan.run_dir / METRICS)[0], self.best)
        folder = plan.run_dir / "checkpoints"
        self.asked = Asking(self.federation, self.layout, self.keys, plan.run, bytes.fromhex(self.run.nonce), folder)
        self._writing = threading.RLock()  # held while a file of the run is written

    def _make_metrics(self) -> Metrics:
        metrics, address = serve_metrics("server", "server", self.plan.metrics, self.log)
        if address:
            self.log("metrics", address=address)
        return metrics

    def _make_evaluation(self) -> Evaluation:
        at = self.plan.evaluator
        whom = [Identity(self.federation.name, *party) for party in serving(self.federation, "evaluator")]
        remote = Remote(rpc.evaluator(rpc.channel(at, self.keys, whom[0]))) if at and whom else None
        if self.federation.sites_evaluate:
            return AtSites(self.federation, remote)
        return remote or Local(self.federation, self.plan.data_dir)

    def play(self) -> None:
        """All rounds. Whatever ends it, the transcript is closed with the truth about it."""
        try:
            done = self.done
            if done:
                self._resume(self.checkpoints.load(done))
            sites = len(self.federation.sites)
            present = self.nodes.wait(lambda n: self.log("waiting", run=self.plan.run, sites=sites, present=n))
            self.log("started", run=self.plan.run, round=done + 1, sites=len(present))
            if not done:
                self._evaluate(0, Outcome(0), 0.0)
            self._rounds()
            self._farewells()
        except BaseException as error:
            self.log("failed", run=self.plan.run, reason=_reason(error))
            with self._writing:  # there may be no time for more
                self.run.update(**self.statement.now(self.done))
            self._finish()
            self._close("interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")
            raise
        self._finish()
        self._close("completed")
        early: dict[str, Any] = {"reason": self.early} if self.early else {}
        self.log("completed", run=self.plan.run, **early)

    def _finish(self) -> None:
        """Tell the other parties that the run is over, and pin what they recorded of it."""
        try:
            heads = [*self.route.finish(self.plan.run), *self.evaluation.heads]
        except grpc.RpcError as error:
            self.log("finish", reason=explain(error))
            return
        with self._writing:
            refused = self.run.pin(heads, self.keys.authority_file.read_bytes()) if heads else []
        for reason in refused:
            self.log("not-pinned", run=self.plan.run, reason=reason)

    def _close(self, status: str) -> None:
        stopped = {"round": self.done, "reason": self.early} if self.early else None
        with self._writing:
            self.run.close(status, **self.statement.now(self.done), best=self.best.to_json(), stopped=stopped)

    def interrupt(self) -> None:
        """Close the run from another thread, before the process exits: no file of the run is written after this."""
        self._writing.acquire()
        if not self.run.closed:
            self._close("interrupted")

    def _rounds(self) -> None:
        """All rounds that are left, or until the metric no longer improves."""
        while self.done < self.federation.rounds:
            if early := self.best.over():
                self.early = early
                return
            self._round(self.done + 1)

    def _round(self, round: int) -> None:
        """One round, with as many attempts as it needs: combine, record, evaluate, checkpoint."""
        began = time.monotonic()
        counts = 0 if self.board.has(round - 1) else self.evaluation.wanted(round - 1)
        ask, outcome = self._attempts(round, self.strategy.cohort(round, self.nodes.present()), counts=counts)
        grouped = self._grouped(outcome)
        self._record(ask, outcome)
        self._score(round - 1, outcome)
        if grouped is not None:
            self.models = grouped
        elif outcome.models is not None:
            self.models, self.kept = outcome.models, outcome.kept
        elif outcome.mean is not None:
            with self.metrics.phase("combine"):
                self.models = self.strategy.apply(self.models, outcome.mean)
        elif outcome.rows is not None:
            with self.metrics.phase("combine"):
                self.models = self.strategy.combine(self.models, outcome.rows, outcome.tiers, outcome.owners)
        self._evaluate(round, outcome, time.monotonic() - began)
        self._checkpoint(round)
        self.route.confirm(ask)

    def _grouped(self, outcome: Outcome) -> Models | None:
        """The next models, where groups of sites have their own; what was decided goes into the record of the round."""
        if outcome.rows is None:
            return None
        with self.metrics.phase("combine"):
            found = self.strategy.group(self.models, outcome.rows, outcome.tiers, outcome.owners)
        if found is None:
            return None
        for reason in found.reasons:
            self.log("clusters", run=self.plan.run, reason=reason)
        outcome.seen |= found.arrays
        outcome.noted |= found.noted
        outcome.receipts += [*(Clustered(**one._asdict()) for one in found.placed), *map(Decision.of, found.reasons)]
        return found.models

    def _farewells(self) -> None:
        """Every site gets the final model, and evaluates it; then the best one, unless it has that already."""
        if not self.federation.route.carries_counts:
            return
        last, known = self.done, self.best.round
        counts = 0 if self.board.has(last) else self.evaluation.wanted(last, final=True)
        outcome = self._farewell(last + 1, last, counts)
        self._score(last, outcome or Outcome(0))
        best = self.best.round
        if outcome is not None and best is not None and not last == best == known:
            self._farewell(last + 2, best)

    def _farewell(self, round: int, kept: int, counts: int = 0) -> Outcome | None:
        """Sites get the model after round `kept` for good; those that are away do not fail the run."""
        try:
            if kept != self.done:
                saved = self.checkpoints.load(kept)
                self.models = _models(saved)
                self.strategy.restore(self.models, _under(MOMENT, saved))  # who holds which; nothing is combined later
            ask, outcome = self._attempts(round, self.nodes.present(), counts=counts, farewell=kept)
            self._record(ask, outcome)
            self.route.confirm(ask)
        except Exception as error:  # the rounds are done: nothing after them may fail the run
            self.log("farewell-failed", run=self.plan.run, reason=_reason(error))
            return None
        return outcome

    def _score(self, round: int, outcome: Outcome) -> None:
        """The line of a round whose counts came, or will never come."""
        found = None if outcome.counts is None else self.evaluation.read(outcome.counts)
        with self._writing:
            self.board.score(round, found)

    def _attempts(self, round: int, cohort: list[str], **wanted: int) -> tuple[Ask, Outcome]:
        """Try a round until it succeeds or the tries are used up; `wanted` is what it asks besides updates.

        It is the same attempt every time, for which sites resend the same bytes, unless a middleware has closed it.
        """
        number, wanted = 1, {"best": self.best.round or 0, **wanted}
        present = self.nodes.present()
        if before := self.asked.unfinished(round, wanted.get("farewell", 0), present, self.federation.quorum):
            number, cohort, wanted = before.number, list(before.cohort), before.wanted
        for trial in range(1, self.federation.attempts + 1):
            self.log("farewell" if wanted.get("farewell") else "round", run=self.plan.run, round=round, attempt=trial)
            try:
                ask = self._ask(round, cohort, number, wanted)
                return ask, self._attempt(ask)
            except (RoundFailed, grpc.RpcError) as error:
                reason = _retryable(error)
                if isinstance(error, RoundFailed) and error.events:
                    self.view.record(ask.round, VOID + ask.attempt, error.seen, (), error.events)
                if reason is None:
                    raise
                number += isinstance(error, grpc.RpcError) and error.code().name == CLOSED
                number = max(number, error.number if isinstance(error, RoundFailed) else 0)
            self.log("attempt-failed", run=self.plan.run, round=round, attempt=trial, reason=reason)
            self.invitations.withdraw()
            time.sleep(PAUSE)
            if trial < self.federation.attempts and not wanted.get("farewell"):
                self.nodes.await_back(cohort)
        raise LaunchError(f"round {round} failed {self.federation.attempts} times; last reason: {reason}")

    def _ask(self, round: int, cohort: list[str], number: int, wanted: dict[str, int]) -> Ask:
        """The terms of an attempt, which name it; on our disk before anybody is asked."""
        model = self.route.digest(self.plan.run, wanted.get("farewell") or round - 1, self.models.get(MODEL))
        ask = self.asked.make(round, cohort, number, wanted, model)
        with self._writing:
            if self.asked.keep(ask):
                self.statement.ask(ask)
        return ask

    def _attempt(self, ask: Ask) -> Outcome:
        """One attempt, with its metrics."""
        model = self.models.get(MODEL)
        self.metrics.moved("out", 0 if model is None else self.route.copies(ask) * model.nbytes)
        self.metrics.opened(1)
        ended = "failed"
        try:
            with self.metrics.phase("collect"):
                outcome = self.route.play(ask, model)
            ended = "released"
        finally:
            self.metrics.opened(-1)
            self.metrics.ended(ended)
        self.metrics.moved("in", outcome.received)
        return outcome

    def _record(self, ask: Ask, outcome: Outcome) -> None:
        """Exactly what this server saw, and the models it held."""
        rows = {} if outcome.rows is None else self.federation.coding.stored(outcome.rows)
        events: list[Event] = [*(Invited(name=name) for name in sorted(ask.cohort)), *outcome.receipts]
        if ask.farewell:
            if not outcome.seen:
                return
            events.append(Farewell(round=ask.farewell))
        held = self.models if outcome.models is None else {}  # otherwise they are the sites'
        arrays = {**held, **rows, **outcome.seen}
        self.view.record(ask.round, filed(ask)["attempt"], arrays, outcome.tiers, events)

    def _evaluate(self, round: int, outcome: Outcome, seconds: float) -> None:
        """A round is over: its scores are known now, or wait for the sites' counts."""
        taken = {"seconds": float(f"{seconds:.4f}"), "updates": outcome.count, "bytes": outcome.received}
        taken |= outcome.noted
        self.board.done(round, taken)
        with self.metrics.phase("evaluate"):
            found = self.evaluation.now(self.plan.run, round, self.models, self.strategy.holders)
        if found is not None or not self.evaluation.wanted(round, final=round == self.federation.rounds):
            with self._writing:
                self.board.score(round, found)

    def _checkpoint(self, round: int) -> None:
        moments = {f"{MOMENT}{name}": array for name, array in self.strategy.state().items()}
        kept = {f"{KEPT}{name}": array for name, array in self.kept.items()}
        with self.metrics.phase("checkpoint"), self._writing:
            self.checkpoints.save(round, {**moments, **kept, **self.models}, self.best.round)
            self.done = round

    def _resume(self, saved: Arrays) -> None:
        self.models, self.kept = _models(saved), _under(KEPT, saved)
        self.strategy.restore(self.models, _under(MOMENT, saved))


def _models(saved: Arrays) -> Models:
    """The models of a checkpoint."""
    return {name: array for name, array in saved.items() if not name.startswith((MOMENT, KEPT))}


def _under(prefix: str, saved: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in saved.items() if name.startswith(prefix)}


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.RpcError):
        return explain(error)
    return str(error) if isinstance(error, FederationError) else f"{type(error).__name__}: {error}"


def _retryable(error: RoundFailed | grpc.RpcError) -> str | None:
    """Why another attempt may help, or None."""
    if isinstance(error, RoundFailed):
        return str(error)
    return explain(error) if error.code().name in PASSING else None
