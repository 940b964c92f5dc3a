"""How good the model is: evaluated here, or by the evaluator of a sharded federation."""

from __future__ import annotations

import time
from pathlib import Path

from fl_privacy.config import Federation
from fl_privacy.models.initial import initial
from fl_privacy.tasks.train import Metrics, mean
from fl_privacy.tasks.workload import Workload
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.client import patiently
from fl_privacy.wire.rpc import Stub

from .strategy import MODEL, Models

CALL = 600.0
PATIENCE = 30.0


class Local:
    """The server has the model and held-out data."""

    def __init__(self, federation: Federation, data_dir: Path | None) -> None:
        self._work = Workload(federation, data_dir)
        self.initial: Models = {MODEL: initial(federation)}

    def __call__(self, run: str, round: int, models: Models) -> Metrics:
        """Of several models, the mean over them."""
        found = [self._work.evaluate(model) for model in models.values()]
        return found[0] if len(found) == 1 else mean(found)


class Remote:
    """The evaluator joins the shards; only its metrics come here. Asked for round 0, it seeds the aggregators."""

    initial: Models = {}  # noqa: RUF012 (never changed)

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def __call__(self, run: str, round: int, models: Models) -> Metrics:
        request = pb.EvaluateRequest(run=run, round=round)
        reply = patiently(lambda: self._stub.evaluate(request, timeout=CALL), time.monotonic() + PATIENCE)
        given = {name: getattr(reply, name) for name in ("accuracy", "rmse") if reply.HasField(name)}
        return Metrics(given.get("accuracy"), reply.loss, given.get("rmse"))
