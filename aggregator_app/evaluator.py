"""`python -m aggregator_app.evaluator`: joins the shards of a sharded federation; the server gets only metrics."""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import grpc

from fl_privacy.config import Federation
from fl_privacy.config.evaluate import due
from fl_privacy.deploy import process
from fl_privacy.errors import ProtocolError
from fl_privacy.identity.keyring import Keyring, peer
from fl_privacy.models.initial import initial
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import OFF
from fl_privacy.routes.ends import peers
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.vector import Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc

CALL = 60.0
ATTEMPT = "evaluated"  # the model is that after a whole round, whichever attempt produced it


class Evaluator:
    """Gives the aggregators the federation's initial model; holds held-out data, unless the sites evaluate."""

    log = Log("evaluator")
    metrics = OFF

    def __init__(
        self,
        federation: Federation,
        keys: Keyring,
        aggregators: list[str],
        data_dir: Path | None,
        recorder: RunRecorder | None = None,
    ) -> None:
        route = federation.route
        self._partial, self._cuts = route.tolerant, route.joins_every_round
        found = peers(federation, aggregators)
        self._federation, self._recorder = federation, recorder
        work = Workload(federation, data_dir)
        self._work = work if federation.sites_evaluate else work.loaded()
        self._initial = initial(federation)
        self._stubs = [rpc.middleware(rpc.channel(address, keys, whom)) for address, whom in found]
        self._cut = route.parts(federation, self._work.layout.size)
        self._alone = threading.Lock()  # a cut has one vector for all its results

    async def evaluate(self, request: pb.EvaluateRequest, context: Any) -> pb.EvaluateReply:
        """Metrics of the model after a round. Round 0 seeds the aggregators; with `masks: round`, every round does."""
        peer(context, self._federation.name, "server")
        return await asyncio.to_thread(self._evaluate, request)

    def refused(self, error: ProtocolError) -> None:
        """Called for every request that is refused."""
        self.metrics.reject(error.code, str(error))
        self.log.rate_limited("refused", code=error.code, reason=str(error))

    def _evaluate(self, request: pb.EvaluateRequest) -> pb.EvaluateReply:
        with self._alone:
            return self._of(request)

    def _of(self, request: pb.EvaluateRequest) -> pb.EvaluateReply:
        try:
            model = self._join(request.run, request.round) if request.round else self._initial
            if self._cuts or not request.round:
                self._seed(request.run, request.round, model)
        except grpc.RpcError as error:
            self.metrics.ended("failed")
            raise ProtocolError("UNAVAILABLE", f"aggregator: {error.code().name}") from None
        if self._recorder is not None:
            self._recorder.record(request.run, request.round, ATTEMPT, {"model": model})
        head = (self._recorder.head(request.run) if self._recorder else None) or b""
        if self._federation.sites_evaluate or not due(self._federation, request.round):
            return pb.EvaluateReply(head=head)
        with self.metrics.phase("evaluating"):
            metrics = self._work.evaluate(model)
        self.metrics.ended("evaluated")
        self.log("evaluated", run=request.run, round=request.round, accuracy=metrics.accuracy, loss=metrics.loss)
        return pb.EvaluateReply(**vars(metrics), head=head)

    def _seed(self, run: str, round: int, model: Vector) -> None:
        """Give the aggregators their shards of the model that the next round starts from, unless they have them."""
        for stub, shard in zip(self._stubs, self._cut.at(round + 1).split(model), strict=True):
            try:
                client.seed(stub, run, round, shard, CALL)
                self.metrics.moved("out", shard.nbytes)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                    raise

    def _join(self, run: str, round: int) -> Vector:
        shards = []
        for stub in self._stubs:
            header, shard = client.fetch(stub, pb.FetchRequest(run=run, newest=True), CALL)
            late = header.round > round if self._partial else header.round != round
            if late or shard is None:
                raise ProtocolError("FAILED_PRECONDITION", f"round: an aggregator is at {header.round}, not at {round}")
            shards.append(shard)
            self.metrics.moved("in", shard.nbytes)
        return self._cut.at(round).join(shards)


def main() -> int:
    parser: argparse.ArgumentParser = process.arguments("The evaluator of a sharded federation")
    parser.add_argument("--middleware", nargs="+", required=True, help="host:port of every aggregator, in order")
    parser.add_argument("--data-dir", type=Path, help="data folder; default: FL_PRIVACY_DATA")
    options = parser.parse_args()
    log = Log("evaluator")

    def make(federation: Federation) -> Evaluator:
        recorder = process.recorder(options, federation, "evaluator")
        return Evaluator(federation, Keyring(options.keys), options.middleware, options.data_dir, recorder)

    return process.run("fl_privacy.wire.Evaluator", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
