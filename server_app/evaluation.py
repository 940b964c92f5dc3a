"""How good the model is: evaluated here, by the evaluator of a sharded federation, or by the sites."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fl_privacy.config import Federation
from fl_privacy.config.evaluate import due, form_of, noise_of
from fl_privacy.dp.counts import BOUNDS
from fl_privacy.models.initial import initial, started
from fl_privacy.scores.form import Counts, Tally
from fl_privacy.scores.metrics import Scores, scores
from fl_privacy.tasks.train import mean
from fl_privacy.tasks.workload import Workload
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.client import patiently
from fl_privacy.wire.rpc import Stub

from .strategy import MODEL, Models

CALL = 600.0
PATIENCE = 30.0
ALL: Mapping[str, str] = {}  # all sites have the one model


class Evaluation:
    """A way to evaluate the model after a round; this one evaluates at once, and asks nothing of the sites."""

    initial: Models
    heads: Sequence[bytes] = ()  # of what another party recorded, newest last

    def now(self, run: str, round: int, models: Models, holders: Mapping[str, str] = ALL) -> Scores | None:
        """The scores of a round's model; None if there are none, or they come later, with the sites' counts.

        `holders` says by site which of several models it has.
        """
        raise NotImplementedError

    def wanted(self, round: int, final: bool = False) -> int:
        """How many numbers the sites' counts of a round's model have; 0: sites do not evaluate it."""
        return 0

    def read(self, counts: Counts) -> Scores:
        """What the counts of all sites together say."""
        raise NotImplementedError


class Local(Evaluation):
    """The server has the model and held-out data."""

    def __init__(self, federation: Federation, data_dir: Path | None) -> None:
        self._federation, self._work = federation, Workload(federation, data_dir)
        self.initial = {MODEL: initial(federation)}

    def now(self, run: str, round: int, models: Models, holders: Mapping[str, str] = ALL) -> Scores | None:
        """Of several models, the mean over them, or over the sites that have them."""
        if not due(self._federation, round):
            return None
        wanted = set(holders.values()) or models.keys()
        by_name = {name: self._work.evaluate(models[name]) for name in sorted(wanted)}
        found = [by_name[name] for name in holders.values()] or list(by_name.values())
        return Scores(**vars(found[0] if len(found) == 1 else mean(found)))


class Remote(Evaluation):
    """The evaluator joins the shards; only its metrics come here. Asked for round 0, it seeds the aggregators."""

    def __init__(self, stub: Stub) -> None:
        self._stub, self.initial = stub, {}

    def now(self, run: str, round: int, models: Models, holders: Mapping[str, str] = ALL) -> Scores | None:
        request = pb.EvaluateRequest(run=run, round=round)
        reply = patiently(lambda: self._stub.evaluate(request, timeout=CALL), time.monotonic() + PATIENCE)
        self.heads = [bytes(reply.head)] if reply.head else []
        found = {name: getattr(reply, name) for name in ("accuracy", "rmse", "loss") if reply.HasField(name)}
        return Scores(**found) if found else None


class AtSites(Evaluation):
    """Sites evaluate. The counts of a model come with the updates of the next round, as one sum.

    `seeding` is the evaluator of a sharded federation, which gives the aggregators their initial shards, or those of
    every round.
    """

    def __init__(self, federation: Federation, seeding: Remote | None) -> None:
        self._form, self._every, self._seeding = form_of(federation), federation.evaluate.every, seeding
        self._joins, noise = federation.route.joins_every_round, noise_of(federation)
        self._shows_records = noise is None or BOUNDS[noise.protects].shows_records
        holds = seeding is None and federation.route.server_holds_model
        self.initial = {MODEL: started(federation)} if holds else {}

    @property
    def heads(self) -> Sequence[bytes]:  # type: ignore[override]
        return self._seeding.heads if self._seeding else ()

    def now(self, run: str, round: int, models: Models, holders: Mapping[str, str] = ALL) -> None:
        if self._seeding is not None and (round == 0 or self._joins):
            self._seeding.now(run, round, models)

    def wanted(self, round: int, final: bool = False) -> int:
        return self._form.length if final or round % self._every == 0 else 0

    def read(self, counts: Counts) -> Scores:
        found = scores(Tally.of(self._form, counts))
        return found if self._shows_records else replace(found, records=None)
