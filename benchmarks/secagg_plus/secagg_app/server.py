"""Flower's own SecAgg+ with FedAvg, evaluated on the server after every round; writes a line for each evaluation.

All sites hold shares of every site's keys, and all but one are needed to remove a mask: t = n - 1.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from fl_privacy.config import Federation
from fl_privacy.tasks.train import evaluate
from fl_privacy.tasks.workload import Workload

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    federation = Federation.parse(str(context.run_config["federation"]))
    work, timings = Workload(federation), Path(str(context.run_config["timings"]))
    sites, last = len(federation.sites), list[Any]()
    while len(list(grid.get_node_ids())) < sites:
        time.sleep(0.5)

    def judge(round: int, arrays: list[Any], config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """A round that released nothing leaves the model as it was."""
        released = not last or any(not np.array_equal(a, b) for a, b in zip(arrays, last, strict=True))
        last[:] = arrays
        names = work.model.state_dict()
        work.model.load_state_dict({name: torch.tensor(one) for name, one in zip(names, arrays, strict=True)})
        found = evaluate(work.model, work.test)
        line = {"round": round, "time": time.time(), "accuracy": found.accuracy, "released": released}
        with timings.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return found.loss, {}

    initial = [one.numpy() for one in work.model.state_dict().values()]
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=2,
        min_evaluate_clients=0,
        min_available_clients=2,  # a site that stops is no longer available, and the others go on
        on_fit_config_fn=lambda round: {"round": round},
        evaluate_fn=judge,
        initial_parameters=ndarrays_to_parameters([one.copy() for one in initial]),
    )
    legacy = LegacyContext(context, ServerConfig(num_rounds=federation.rounds), strategy)
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(sites, sites - 1))(grid, legacy)
