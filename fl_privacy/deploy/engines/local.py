"""The local engine: every party a process on this machine, joined by mutual TLS as they would be across machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import httpx

from fl_privacy.deploy import flower
from fl_privacy.deploy.commands import LOOPBACK, Ports, processes
from fl_privacy.deploy.engines.follow import Submitted
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.place import Place
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.errors import LaunchError


def start(workspace: Workspace, app: Path = flower.APP) -> Submitted:
    """Start the federation and submit its run.

    Start-up is most of a short run's time: the run is submitted as soon as the SuperLink answers, so that the ServerApp
    loads while the sites do, and waits for them itself.
    """
    workspace.load(nodes=True)
    workspace.prepare()
    superlink, ports = workspace.place("superlink", "superlink"), Ports.free()
    address = f"{LOOPBACK}:{ports.superlink}"
    superlink.database.unlink(missing_ok=True)
    workspace.start(superlink, processes(superlink, ports))
    workspace.addresses["superlink"] = [address]
    workspace.start_middleware()
    sites = [workspace.place("site", name) for name in workspace.federation.site_names]
    own = {site.name: list(processes(site, Ports.free())) for site in sites}
    workers = []
    for site in sites:
        workers += workspace.start(site, [process for process in own[site.name] if not process.confined])
    bundle, control = flower.build_app(app), flower.Control(address, superlink.keys.authority_file)

    def submit() -> int:
        control.wait(workspace.supervisor.step)
        workspace.write_server_plan()
        return control.start_run({"home": str(workspace.private)}, bundle)

    submitted = Submitted(control, submit(), submit, ServerPlan.lock(workspace.private))
    for site in sites:
        node = Node(control, site)
        node.register()
        workspace.start(site, [process for process in own[site.name] if process.confined], node.renew)
    for worker in workers:
        workspace.supervisor.wait(worker)
    return submitted


@dataclass
class Node:
    """A SuperNode has a folder and a key of its own, and nothing of the worker's but its socket."""

    control: flower.Control
    site: Place
    key: bytes = b""

    def register(self) -> None:
        self.site.node.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.key = flower.node_key(self.site.node_key)
        self.control.register(self.key, self.site.name)
        (self.site.node / "ca.pem").write_bytes(self.site.keys.authority_file.read_bytes())

    def renew(self) -> None:
        """Before a restart: the SuperLink refuses the key of a SuperNode that was killed for a minute."""
        try:
            number = self.control.nodes().get(self.key)
            if number is not None:
                self.control.unregister(number)
            self.register()
        except httpx.HTTPError as error:
            raise LaunchError(f"superlink: did not register the SuperNode of {self.site.name} ({error})") from None
