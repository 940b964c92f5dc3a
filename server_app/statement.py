"""What the server states about a run in its signed manifest."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

from fl_privacy.config import Federation, evaluate
from fl_privacy.config.changes import accepted
from fl_privacy.config.guarantee import Asked, guarantee, stated
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.registry import packages
from fl_privacy.routes.ends import Ask
from fl_privacy.tasks.making import task_of
from fl_privacy.transcript.run import MANIFEST, VIEWS, load_manifest
from fl_privacy.transcript.signing import utc_now
from fl_privacy.vector import Layout

VERSIONS = ("fl-privacy", "flwr", "torch", "numpy", "grpcio")


class Statement:
    """The manifest of a run, from its start or from its last checkpoint, after `done` rounds."""

    def __init__(self, federation: Federation, plan: ServerPlan, layout: Layout, done: int) -> None:
        self._federation, self._plan, self._layout, self._done = federation, plan, layout, done
        self._where = str(plan.run_dir / MANIFEST)
        self._before = load_manifest(plan.run_dir)[0] if (plan.run_dir / MANIFEST).exists() else {}
        self._asked = self._asked_before()

    def begin(self) -> dict[str, Any]:
        """What is known when the run starts or is resumed."""
        federation, task = self._federation, self._federation.task
        return {
            "run": self._plan.run,
            "config": federation.model_dump(mode="json"),
            "digest": federation.digest,
            "changes": self._changes(),
            "versions": {**{name: version(name) for name in VERSIONS}, **packages()},
            "seed": federation.seed,
            "layout": self._layout.to_json(),
            "observers": {**self._plan.observers, **self._simulated()},
            "evaluation": evaluate.statement(federation),
            "task": {"name": task.label, "sha256": task.sha256, "preprocessing": task_of(federation).preprocessing},
            **self.now(self._done),
        }

    def _simulated(self) -> dict[str, str]:
        """The views that the route records itself."""
        names = self._federation.route.observers(self._federation) if self._federation.audit else []
        return {name: f"{VIEWS}/{name}" for name in names}

    def ask(self, ask: Ask) -> None:
        """The ledgers of these sites may be charged, for an update or an evaluation or both."""
        if not ask.farewell:
            self._asked.updates.update(ask.cohort)
        if ask.counts:
            self._asked.evaluations.update(ask.cohort)

    def now(self, done: int) -> dict[str, Any]:
        """Rounds done, and what the run guarantees after all attempts so far."""
        terms = guarantee(self._federation, self._asked)
        return {"rounds": done, "guarantee": terms.model_dump(mode="json")}

    def _changes(self) -> list[Any]:
        """What was changed when the run was resumed, each time with the first round that it holds for."""
        if not self._before:
            return []
        new = accepted(self._before, self._federation, self._where)
        entry = {"from_round": self._done + 1, "time": utc_now(), "fields": [change.to_json() for change in new]}
        return [*self._before.get("changes", ()), *([entry] if new else ())]

    def _asked_before(self) -> Asked:
        """How often each site was asked, at most: a server that was killed had no time to say how often."""
        terms = stated(self._before, self._where)
        budgets = {} if terms is None else terms.budgets
        updates = Counter({name: one.attempts for name, one in budgets.items()})
        evaluations = Counter({name: one.evaluations for name, one in budgets.items()})
        if self._before and self._before.get("status") == "running":
            unsaid = (self._done - int(self._before.get("rounds", 0)) + 1) * self._federation.attempts
            for counts in (updates, evaluations):
                counts.update(dict.fromkeys(self._federation.site_names, unsaid))
        return Asked(updates, evaluations)
