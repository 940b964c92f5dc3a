"""The local engine: every party a process on this machine, joined by mutual TLS as they would be across machines."""

from __future__ import annotations

import sys
from pathlib import Path

from fl_privacy.deploy import confine, flower
from fl_privacy.deploy.engines.ground import START, Ground, free_port


def start(ground: Ground, app: Path = flower.APP) -> tuple[flower.Control, int]:
    """Start the federation and submit its run; returns the control API and Flower's id of the run."""
    names = ground.federation.site_names
    ground.prepare()
    keys, fleet = ground.keys("superlink", "superlink"), ground.fleet
    address = f"127.0.0.1:{free_port()}"
    database = ground.private / "superlink" / "state.db"
    database.unlink(missing_ok=True)
    home = {"FLWR_HOME": str(ground.private / "superlink" / "flwr")}
    fleet.start("superlink", flower.superlink(address, keys, database), home)
    ground.start_middleware()
    for name in names:
        fleet.start(f"worker-{name}", _worker(ground, name))
    control = flower.Control(address, keys.authority_file)
    control.wait(fleet.check)
    for name in names:
        _start_node(ground, control, address, name)
    for name in names:
        fleet.wait_for(f"worker-{name}", "listening", START)
    ground.write_server_plan()
    return control, control.start_run({"home": str(ground.private)}, app)


def _worker(ground: Ground, name: str) -> list[str]:
    command = [sys.executable, "-m", "client_app.worker", "--config", str(ground.config), "--site", name]
    command += ["--keys", str(ground.keys("site", name).folder), "--socket", str(ground.sockets / name)]
    command += ["--state", str(ground.sites / name)]
    command += ["--middleware", *ground.middleware, *ground.data_arguments()]
    return [*command, "--truth", str(ground.run_dir / "truth" / name)] if ground.federation.audit else command


def _start_node(ground: Ground, control: flower.Control, address: str, name: str) -> None:
    """A SuperNode has a folder and a key of its own, and nothing of the worker's but its socket."""
    folder = ground.home / "nodes" / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    control.register(flower.node_key(folder / "node.key"), name)
    authority = folder / "ca.pem"
    authority.write_bytes(ground.keys("site", name).authority_file.read_bytes())
    (folder / "tmp").mkdir(exist_ok=True)
    command = flower.supernode(address, authority, folder / "node.key", free_port(), ground.sockets / name)
    home = {"FLWR_HOME": str(folder / "flwr"), "TMPDIR": str(folder / "tmp")}
    ground.fleet.start(f"supernode-{name}", confine.wrapped(command, [], [folder]), home, confined=True)
