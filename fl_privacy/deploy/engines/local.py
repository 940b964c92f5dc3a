"""The local engine: every party a process on this machine, joined by mutual TLS as they would be across machines."""

from __future__ import annotations

from pathlib import Path

from fl_privacy.deploy import flower
from fl_privacy.deploy.commands import LOOPBACK, Ports, processes
from fl_privacy.deploy.engines.workspace import START, Workspace
from fl_privacy.deploy.place import Place


def start(workspace: Workspace, app: Path = flower.APP) -> tuple[flower.Control, int]:
    """Start the federation and submit its run; returns the control API and Flower's id of the run.

    Start-up is most of a short run's time: the run is submitted as soon as the SuperLink answers, so that the ServerApp
    loads while the sites do, and waits for them itself.
    """
    workspace.prepare()
    superlink, ports, fleet = workspace.place("superlink", "superlink"), Ports.free(), workspace.fleet
    address = f"{LOOPBACK}:{ports.superlink}"
    superlink.database.unlink(missing_ok=True)
    workspace.start(superlink, processes(superlink, ports))
    workspace.addresses["superlink"] = [address]
    workspace.start_middleware()
    sites = [workspace.place("site", name) for name in workspace.federation.site_names]
    own = {site.name: list(processes(site, Ports.free())) for site in sites}
    for site in sites:
        workspace.start(site, [process for process in own[site.name] if not process.confined])
    bundle, control = flower.build_app(app), flower.Control(address, superlink.keys.authority_file)
    control.wait(fleet.check)
    workspace.write_server_plan()
    run = control.start_run({"home": str(workspace.private)}, bundle)
    for site in sites:
        _register(control, site)
        workspace.start(site, [process for process in own[site.name] if process.confined])
    for site in sites:
        fleet.wait_for(f"worker-{site.name}", "listening", START)
    return control, run


def _register(control: flower.Control, site: Place) -> None:
    """A SuperNode has a folder and a key of its own, and nothing of the worker's but its socket."""
    site.node.mkdir(parents=True, exist_ok=True, mode=0o700)
    control.register(flower.node_key(site.node_key), site.name)
    (site.node / "ca.pem").write_bytes(site.keys.authority_file.read_bytes())
