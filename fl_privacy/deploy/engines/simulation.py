"""The simulation engine: the same apps on Flower's Simulation Runtime, beside the same middleware processes."""

from __future__ import annotations

import json
import os
import sys

from fl_privacy.deploy import flower
from fl_privacy.deploy.engines.ground import Ground


class Running:
    """The status of a run without a SuperLink: it is running for as long as its process."""

    def status(self, run: int) -> flower.Status:
        return flower.Status("running", "", "")

    def close(self) -> None:
        """Nothing is open."""


def start(ground: Ground) -> tuple[Running, int]:
    """Start the middleware, and the process that runs the ServerApp and forks the sites."""
    ground.prepare()
    ground.start_middleware()
    facts = {
        "config": str(ground.config),
        "data_dir": str(ground.data_dir) if ground.data_dir else None,
        "run_dir": str(ground.run_dir),
        "middleware": ground.middleware,
        "sites": str(ground.sites),
    }
    (ground.private / "simulation.json").write_text(json.dumps(facts))
    ground.write_server_plan(invite_every_round=True)
    sites = len(ground.federation.sites)
    processes = min(os.cpu_count() or 1, ground.federation.cohort)
    command = [sys.executable, "-m", "client_app.forks", "--home", str(ground.private)]
    command += ["--sites", str(sites), "--processes", str(processes)]
    ground.fleet.start("simulation", command)
    return Running(), 0
