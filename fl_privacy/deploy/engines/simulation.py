"""The simulation engine: the same apps on Flower's Simulation Runtime, beside the same middleware processes."""

from __future__ import annotations

import json
import os
import sys

from fl_privacy.deploy import flower
from fl_privacy.deploy.commands import Process
from fl_privacy.deploy.engines.follow import Submitted
from fl_privacy.deploy.engines.workspace import SIMULATED_SITES, Workspace
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.deploy.supervise import Watched
from fl_privacy.errors import LaunchError


class Running:
    """The status of a run without a SuperLink: it is running for as long as its process lives."""

    def status(self, run: int) -> flower.Status:
        return flower.Status("running", "", "")

    def close(self) -> None:
        """Nothing is open."""


def start(workspace: Workspace) -> Submitted:
    """Start the middleware, and the process that runs the ServerApp and forks the sites."""
    workspace.load()
    workspace.prepare()
    workspace.start_middleware()
    facts = {
        "config": str(workspace.config),
        "data_dir": str(workspace.data_dir) if workspace.data_dir else None,
        "run_dir": str(workspace.run_dir),
        "middleware": workspace.middleware,
        "sites": str(workspace.sites),
    }
    (workspace.private / "simulation.json").write_text(json.dumps(facts))
    sites, cores = len(workspace.federation.sites), _cores()
    # With a process for every site, one message starts all rounds: sites wait for the next one at the middleware.
    # Flower's runtime waits for each of them in a thread of a pool, which Python limits to this many.
    resident = sites <= min(32, cores + 4)
    if workspace.federation.route.needs_all_sites and not resident:
        most = min(32, cores + 4)
        raise LaunchError(f"sites: {sites} that work for each other need a process each, and {most} fit; use local")
    processes = sites if resident else min(cores, workspace.federation.cohort)

    def plan() -> None:
        workspace.write_server_plan(invite_every_round=not resident)

    plan()
    command = [sys.executable, "-m", SIMULATED_SITES, "--home", str(workspace.private)]
    command += ["--sites", str(sites), "--processes", str(processes)]
    workspace.supervise(Watched(Process("simulation", command), flower.direct(), plan))
    # A process that was restarted continues the run by itself.
    return Submitted(Running(), 0, lambda: 0, ServerPlan.lock(workspace.private))


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
