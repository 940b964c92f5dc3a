"""The simulation engine: the same apps on Flower's Simulation Runtime, beside the same middleware processes."""

from __future__ import annotations

import json

from fl_privacy.addresses import free_port
from fl_privacy.deploy import flower
from fl_privacy.deploy.engines.workspace import Workspace


def start(workspace: Workspace) -> tuple[flower.Control, int]:
    """Start the SuperLink in simulation mode and submit the run."""
    workspace.prepare()
    keys, fleet = workspace.keys("superlink", "superlink"), workspace.fleet
    address = f"127.0.0.1:{free_port()}"
    # Ray's sessions go with the run: in the machine's common folder they would pile up, and two starts would meet.
    home = {"FLWR_HOME": str(workspace.private / "superlink" / "flwr"), "RAY_TMPDIR": str(workspace.sockets)}
    database = workspace.private / "superlink" / "state.db"
    database.unlink(missing_ok=True)
    fleet.start("superlink", flower.superlink(address, keys, database, simulation=True), home)
    workspace.start_middleware()
    facts = {
        "config": str(workspace.config),
        "data_dir": str(workspace.data_dir) if workspace.data_dir else None,
        "run_dir": str(workspace.run_dir),
        "middleware": workspace.middleware,
        "sites": str(workspace.sites),
    }
    (workspace.private / "simulation.json").write_text(json.dumps(facts))
    workspace.write_server_plan(invite_every_round=True)
    control = flower.Control(address, keys.authority_file)
    control.wait(fleet.check)
    return control, control.start_run({"home": str(workspace.private)}, simulated_sites=len(workspace.federation.sites))
