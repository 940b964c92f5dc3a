"""How good the model is: evaluated here, or by the evaluator of a sharded federation."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.tasks.train import Metrics
from fl_privacy.tasks.workload import Workload
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.client import patiently
from fl_privacy.wire.rpc import Stub

CALL = 600.0
PATIENCE = 30.0


class Local:
    """The server has the model and held-out data."""

    def __init__(self, federation: Federation, data_dir: Path | None) -> None:
        self._work = Workload(federation, data_dir)
        self.initial = self._work.initial

    def __call__(self, run: str, round: int, model: NDArray[np.float32] | None) -> Metrics:
        assert model is not None
        return self._work.evaluate(model)


class Remote:
    """The evaluator joins the shards; only its metrics come here. Asked for round 0, it seeds the aggregators."""

    initial = None

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def __call__(self, run: str, round: int, model: NDArray[np.float32] | None) -> Metrics:
        request = pb.EvaluateRequest(run=run, round=round)
        reply = patiently(lambda: self._stub.evaluate(request, timeout=CALL), time.monotonic() + PATIENCE)
        given = {name: getattr(reply, name) for name in ("accuracy", "rmse") if reply.HasField(name)}
        return Metrics(given.get("accuracy"), reply.loss, given.get("rmse"))
