"""A real SuperLink behind the gate, a SuperNode and a SuperExec behind relays: Flower as it is deployed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_privacy.addresses import free_port
from fl_privacy.deploy import flower
from fl_privacy.deploy.processes import Fleet
from fl_privacy.files import write_secret
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.tls import LocalKeys
from gates import Front, Proxy, ask, post
from helpers import START, Keys, eventually

APP = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "ping"
version = "0.1.0"
description = "One message to every node and back"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "test"

[tool.flwr.app.components]
serverapp = "ping.server:app"
clientapp = "ping.client:app"

[tool.flwr.app.config]
home = ""
""",
    "ping/__init__.py": "",
    "ping/client.py": """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    said = message.content.config_records["ping"]["text"]
    return Message(RecordDict({"pong": ConfigRecord({"text": said + " and back"})}), reply_to=message)
""",
    "ping/server.py": """
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    content = RecordDict({"ping": ConfigRecord({"text": "there"})})
    replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes], timeout=60))
    Path(context.run_config["home"], "said").write_text(replies[0].content.config_records["pong"]["text"])
""",
}


class World:
    """The three machines of a small federation, all on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, Keys(folder / "keys")
        self.fleet = Fleet(folder / "logs", folder / "pids")
        self.secret = folder / "secret"
        write_secret(self.secret, b"s" * 32)
        local = LocalKeys.open(folder / "superlink", "superlink")
        self.front = Front(self.keys, self.fleet, f"127.0.0.1:{free_port()}", local)
        database = folder / "superlink" / "state.db"
        command = flower.superlink_behind_gate(self.front.superlink, local, database, self.secret)
        self.start("superlink", command)
        self.proxy = Proxy()
        self.front.address = f"127.0.0.1:{free_port()}"
        self.clinic = self.relay("relay-clinic", self.keys.of("site", "clinic"), self.proxy.url)
        self.server = self.relay("relay-server", self.keys.of("server", "server"))
        self.front.start(self.front.address)
        for name in ("relay-clinic", "relay-server"):
            self.fleet.wait_for(name, "listening", START)
        self.start("superexec", flower.superexec(self.server, self.certificate("relay-server"), self.secret))

    def start(self, name: str, command: list[str]) -> None:
        # A proxy from the environment must not come between a program and its relay.
        env = {"HTTPS_PROXY": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
        env |= {"FLWR_HOME": str(self.folder / name / "flwr"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        self.fleet.start(name, command, {**env, **flower.direct()})

    def relay(self, name: str, keys: Keyring, proxy: str = "") -> str:
        address = f"127.0.0.1:{free_port()}"
        self.fleet.start(name, flower.relay(self.front.address, keys, self.folder / name, address, proxy))
        return address

    def certificate(self, name: str) -> Path:
        return self.folder / name / "relay.pem"

    def start_node(self) -> None:
        certificate, key = self.certificate("relay-clinic"), self.folder / "node.key"
        self.start("supernode", flower.supernode(self.clinic, certificate, key, free_port(), self.folder / "worker"))

    def restart_gate(self) -> None:
        """Kill the gate, and restart it once the site's relay has noticed."""
        gate = self.fleet.children.pop("gate")
        gate.signal(signal.SIGKILL)
        gate.process.wait()
        eventually(lambda: bool(self.front.events("unreachable", "relay-clinic")), START)
        self.front.start(self.front.address)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    try:
        yield world
    finally:
        world.fleet.stop("supernode")
        world.fleet.stop()
        world.proxy.close()


def test_a_run_passes_gate_and_relays_and_survives_a_restart_of_the_gate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    control = flower.Control(world.server, world.certificate("relay-server"))
    control.wait(world.fleet.check)
    control.register(flower.node_key(world.folder / "node.key"), "clinic")
    world.start_node()
    log = world.fleet.children["supernode"].log
    eventually(lambda: "SuperNode ID" in log.read_text(), START)
    assert world.proxy.asked[0] == world.front.address
    assert any("site/clinic" in e["identity"] for e in world.front.events("joined"))
    world.restart_gate()
    app = world.folder / "ping"
    for name, text in APP.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    run = control.start_run({"home": str(world.folder)}, flower.build_app(app))
    until = time.monotonic() + 90
    while (status := control.status(run)).status != "finished":
        world.fleet.check()
        assert time.monotonic() < until, status
        time.sleep(0.2)
    assert status.sub_status == "completed", status
    assert (world.folder / "said").read_text() == "there and back"
    assert len(world.front.events("connected", "relay-clinic")) >= 2
    control.close()


def test_a_site_reaches_no_path_of_the_control_and_runtime_apis(world: World) -> None:
    from flwr.supercore.routers.runtime import responses_router, router as runtime
    from flwr.superlink.routers.control import router as control

    paths = [route.path for api in (control, runtime, responses_router) for route in api.routes]
    assert len(paths) > 50
    empty = ("Content-Type: application/protobuf", "Accept: application/protobuf")
    with world.front.dial("server") as sock:
        assert ask(sock, post("/v1/control/list-runs", 0, *empty))[0] == 200
        assert ask(sock, post("/v1/runtime/acquire-task", 0, *empty))[0] == 401  # the SuperLink requires the secret
        assert ask(sock, "GET /health HTTP/1.1\nHost: x\n\n")[0] == 200
    for path in paths:
        with world.front.dial("site", "clinic") as sock:
            assert ask(sock, post(path, 0, *empty)) == (403, b"a site may not send this request\n"), path
    with world.front.dial("site", "clinic") as sock:
        code, said = ask(sock, post("/v1/fleet/pull-messages", 0, *empty))
        assert code == 401  # from the SuperLink: it requires the node's signature
        assert "SuperNode authentication" in json.loads(said)["detail"]
