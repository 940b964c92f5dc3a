"""Flower's own FedAvg, evaluated on the server after every round; writes the time of each evaluation to a file."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fl_privacy.config import Federation
from fl_privacy.tasks.train import evaluate
from fl_privacy.tasks.workload import Workload

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    federation = Federation.parse(str(context.run_config["federation"]))
    work, timings = Workload(federation), Path(str(context.run_config["timings"]))

    def judge(round: int, arrays: ArrayRecord) -> MetricRecord:
        work.model.load_state_dict(arrays.to_torch_state_dict())
        found = evaluate(work.model, work.test)
        with timings.open("a") as file:
            file.write(json.dumps({"round": round, "time": time.time(), "accuracy": found.accuracy}) + "\n")
        return MetricRecord({"loss": found.loss})

    sites = len(federation.sites)
    # Sites do not evaluate: that would be a second message per round, which our engine does not send either.
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    initial = ArrayRecord(work.model.state_dict())
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=federation.rounds, evaluate_fn=judge)
