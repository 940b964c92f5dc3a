"""The simulation engine: the same apps on Flower's Simulation Runtime, beside the same middleware processes."""

from __future__ import annotations

import json

from fl_privacy.deploy import flower
from fl_privacy.deploy.engines.ground import Ground, free_port


def start(ground: Ground) -> tuple[flower.Control, int]:
    """Start the SuperLink in simulation mode and submit the run."""
    ground.prepare()
    keys, fleet = ground.keys("superlink", "superlink"), ground.fleet
    address = f"127.0.0.1:{free_port()}"
    # Ray's sessions go with the run: in the machine's common folder they would pile up, and two starts would meet.
    home = {"FLWR_HOME": str(ground.private / "superlink" / "flwr"), "RAY_TMPDIR": str(ground.sockets)}
    database = ground.private / "superlink" / "state.db"
    database.unlink(missing_ok=True)
    fleet.start("superlink", flower.superlink(address, keys, database, simulation=True), home)
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
    control = flower.Control(address, keys.authority_file)
    control.wait(fleet.check)
    return control, control.start_run({"home": str(ground.private)}, simulated_sites=len(ground.federation.sites))
