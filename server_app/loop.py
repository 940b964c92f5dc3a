"""The round loop: cohort, round, combine, record, evaluate, checkpoint, on."""

from __future__ import annotations

import time
from importlib.metadata import version

import grpc
import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fl_privacy.config import Federation, ServerRoute, ShardsRoute
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import Metrics
from fl_privacy.ops.metrics import serve as serve_metrics
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript import RunWriter, ViewWriter
from fl_privacy.transcript.events import Invited
from fl_privacy.wire import rpc

from .evaluation import Local, Remote
from .nodes import Nodes
from .routes import Ask, Outcome, Route, ThroughServer, ThroughShards, ThroughShuffler, attempt_name, retryable
from .strategy import Strategy

PAUSE = 1.0
VERSIONS = ("fl-privacy", "flwr", "torch", "numpy", "grpcio")


class Coordinator:
    """One run, from its first round or its last checkpoint to its end."""

    def __init__(self, grid: Grid, plan: ServerPlan) -> None:
        self.plan = plan
        # Flower keeps what a ServerApp prints to itself, so the events have a file of their own.
        self.log = Log("server", plan.log, plan.events)
        self.metrics = self._make_metrics()
        self.federation = Federation.load(plan.config)
        self.layout = layout_of(self.federation)
        self.strategy = Strategy(self.federation)
        self.nodes = Nodes(grid, self.federation)
        self.keys = Keyring(plan.keys)
        self.route = self._make_route()
        self.evaluation = self._make_evaluation()
        # A sharded federation's server holds no model, so nothing of one can leak from it.
        self.model: NDArray[np.float32] | None = self.evaluation.initial
        key, certificate = load_key(self.keys.key_file), self.keys.certificate_file.read_bytes()
        self.run = RunWriter(plan.run_dir, self._manifest(), key, certificate)
        self.view = ViewWriter(plan.run_dir / "views" / "server", "server", plan.run, key, certificate)
        self.checkpoints = Checkpoints(plan.run_dir / "checkpoints")
        self._message, self._cohort = -1, list[str]()
        self._invited = False
        self._salt = 0

    def _make_metrics(self) -> Metrics:
        metrics, address = serve_metrics("server", "server", self.plan.metrics, self.log)
        if address:
            self.log("metrics", address=address)
        return metrics

    def _make_route(self) -> Route:
        if isinstance(self.federation.route, ServerRoute):
            return ThroughServer(self.federation, self.nodes)
        stubs = [rpc.middleware(rpc.channel(address, self.keys)) for address in self.plan.middleware]
        kind = ThroughShards if isinstance(self.federation.route, ShardsRoute) else ThroughShuffler
        return kind(self.federation, self.nodes, self.layout, stubs)

    def _make_evaluation(self) -> Local | Remote:
        if self.plan.evaluator is None:
            return Local(self.federation, self.plan.data_dir)
        return Remote(rpc.evaluator(rpc.channel(self.plan.evaluator, self.keys)))

    def _manifest(self) -> dict[str, object]:
        return {
            "run": self.plan.run,
            "config": self.federation.model_dump(mode="json"),
            "versions": {name: version(name) for name in VERSIONS},
            "seed": self.federation.seed,
            "private": not self.federation.reproducible,
            "layout": self.layout.to_json(),
            "observers": self.plan.observers,
        }

    def play(self) -> None:
        """All rounds. Whatever ends it, the transcript is closed with the truth about it."""
        try:
            done = max(self.checkpoints.rounds(), default=0)
            if done:
                self._resume(self.checkpoints.load(done))
            sites = len(self.federation.sites)
            present = self.nodes.wait(lambda n: self.log("waiting", run=self.plan.run, sites=sites, present=n))
            self.log("started", run=self.plan.run, round=done + 1, sites=len(present))
            if not done:
                self._evaluate(0, Outcome(0), 0.0)
            for round in range(done + 1, self.federation.rounds + 1):
                self._round(round)
        except BaseException as error:
            self.log("failed", run=self.plan.run, reason=_reason(error))
            self.run.close("failed")
            raise
        else:
            self.run.close("completed")
            self.log("completed", run=self.plan.run)
        finally:
            self._finish()

    def _round(self, round: int) -> None:
        """One round, however many attempts it takes, and all that follows from it."""
        began = time.monotonic()
        ask, outcome = self._attempts(round)
        self._invited = True
        self._record(ask, outcome)
        if self.model is not None and outcome.updates is not None:
            with self.metrics.phase("combine"):
                self.model = self.strategy.combine(self.model, outcome.updates, outcome.tiers)
        self._evaluate(round, outcome, time.monotonic() - began)
        self._checkpoint(round)

    def _attempts(self, round: int) -> tuple[Ask, Outcome]:
        """Try a round until it gives something or the attempts are used up."""
        per_message = self.federation.rounds_per_message
        message = (round - 1) // per_message
        single = self.plan.invite_every_round
        last = round if single else min((message + 1) * per_message, self.federation.rounds)
        if message != self._message:
            self._message, self._cohort = message, self.strategy.cohort(message, self.nodes.present())
        cohort = self._cohort
        invite = single or (round - 1) % per_message == 0 or not self._invited
        for number in range(1, self.federation.attempts + 1):
            name = attempt_name(self.plan.run, round, self.model, cohort, self._salt + number)
            ask = Ask(self.plan.run, round, last, name, cohort, invite or number > 1)
            self.log("round", run=self.plan.run, round=round, attempt=number)
            try:
                return ask, self._attempt(ask)
            except Exception as error:
                reason = retryable(error)
                if reason is None:
                    raise
            self.log("attempt-failed", run=self.plan.run, round=round, attempt=number, reason=reason)
            time.sleep(PAUSE)
            if number < self.federation.attempts:
                self.nodes.await_back(cohort)
        raise LaunchError(f"round {round} failed {self.federation.attempts} times; the last time: {reason}")

    def _attempt(self, ask: Ask) -> Outcome:
        """One attempt, counted."""
        copies = len(ask.cohort) if isinstance(self.federation.route, ServerRoute) else 1
        self.metrics.moved("out", 0 if self.model is None else copies * self.model.nbytes)
        self.metrics.opened(1)
        ended = "failed"
        try:
            with self.metrics.phase("collect"):
                outcome = self.route.play(ask, self.model)
            ended = "released"
        finally:
            self.metrics.opened(-1)
            self.metrics.ended(ended)
        self.metrics.moved("in", outcome.received)
        return outcome

    def _record(self, ask: Ask, outcome: Outcome) -> None:
        """Exactly what this server saw, and the model it held."""
        arrays = {"model": self.model, "updates": outcome.updates}
        held = {name: array for name, array in arrays.items() if array is not None}
        invited = [Invited(name=name) for name in sorted(ask.cohort)]
        self.view.record(ask.round, ask.attempt, held, outcome.tiers, [*invited, *outcome.receipts])

    def _evaluate(self, round: int, outcome: Outcome, seconds: float) -> None:
        with self.metrics.phase("evaluate"):
            metrics = self.evaluation(self.plan.run, round, self.model)
        line = {
            "round": round,
            "accuracy": metrics.accuracy,
            "loss": metrics.loss,
            "rmse": metrics.rmse,
            "seconds": float(f"{seconds:.4f}"),
            "updates": outcome.count,
            "bytes": outcome.received,
        }
        self.run.metric(line)
        self.log("evaluated", run=self.plan.run, **line)

    def _checkpoint(self, round: int) -> None:
        arrays = {f"moment.{name}": array for name, array in self.strategy.state().items()}
        if self.model is not None:
            arrays["model"] = self.model
        with self.metrics.phase("checkpoint"):
            self.checkpoints.save(round, arrays)

    def _resume(self, saved: dict[str, NDArray[np.float32]]) -> None:
        # Attempts of the broken run may have been released: names of ours must not meet them.
        self._salt = int(time.time()) << 8
        if self.model is not None:
            self.model = saved["model"]
            prefix = "moment."
            self.strategy.restore({k.removeprefix(prefix): a for k, a in saved.items() if k.startswith(prefix)})

    def _finish(self) -> None:
        try:
            self.route.finish(self.plan.run)
        except grpc.RpcError as error:
            self.log("finish", reason=error.code().name)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, FederationError) else f"{type(error).__name__}: {error}"
