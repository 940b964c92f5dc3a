"""Anyone who can submit a run ships code to the sites. That code reaches no data, no keys and no upload."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy import confine, environment
from fl_privacy.deploy.confine import landlock
from fl_privacy.deploy.engines import local
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.plan import new_run_name

HOSTILE = Path(__file__).parent / "hostile_app"
CONFIG = "name: victim\nsites: 3\nrounds: 1\ndeadline: 6\ntask: {train: {epochs: 1}}"
SECRET = b"patient record 4711"
SET_BY_FLOWER = {"GRPC_VERBOSITY", "BROWSER_USE_SETUP_LOGGING"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Other programs of the operator's: an agent, whose socket the shell names, and two that listen on loopback."""
    agent = tmp_path_factory.mktemp("agent") / "agent.sock"
    with ExitStack() as held:
        shell = held.enter_context(pytest.MonkeyPatch.context())
        for name, value in {"SSH_AUTH_SOCK": str(agent), "AWS_SECRET_ACCESS_KEY": "wJalr"}.items():
            shell.setenv(name, value)
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        unix = held.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(agent))
        unix.listen()
        agent.chmod(0o600)
        metrics, port = (listener.getsockname()[1] for listener in listeners)
        yield {"agent": str(agent), "metrics": metrics, "port": port}


@pytest.fixture(scope="module")
def loot(tmp_path_factory: pytest.TempPathFactory, programs: dict[str, Any]) -> tuple[list[dict[str, str]], Workspace]:
    """What the hostile ClientApps returned from every site, and their federation."""
    runs, app = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("app") / "hostile_app"
    shutil.copytree(HOSTILE, app)
    federation = Federation.parse(CONFIG)
    workspace = Workspace(federation, new_run_name(federation), runs, None)
    out = runs / "loot.json"
    try:
        workspace.prepare()
        for name in federation.site_names:
            data = workspace.private / "sites" / name / "data"
            data.mkdir()
            (data / "records.csv").write_bytes(SECRET)
        control = local.start(workspace, app).control
        facts = {"private": str(workspace.private), "middleware": workspace.middleware, "digest": federation.digest}
        workers = [child.process.pid for name, child in workspace.fleet.children.items() if name.startswith("worker-")]
        facts |= {**programs, "workers": workers, "out": str(out)}
        (workspace.private / "hostile.json").write_text(json.dumps(facts))
        until = time.monotonic() + 120
        while not out.exists() and time.monotonic() < until:
            workspace.fleet.check()
            time.sleep(0.2)
        workspace.fleet.check()  # all processes survived it
        control.close()
    finally:
        workspace.clear()
    assert out.exists(), "the hostile run did not finish"
    return json.loads(out.read_text()), workspace


def test_the_hostile_code_did_run(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    assert len(loot[0]) == 3
    assert all(found["whose"] == "the FAB's" for found in loot[0])


@pytest.mark.skipif(
    os.geteuid() != 0 and not landlock.version(), reason="without root or Landlock nothing separates the processes"
)
def test_it_reads_neither_keys_nor_data(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    for found in loot[0]:
        for what in ("listed", "key", "authority", "data", "memory"):
            # In a file system of its own, it does not even find them.
            assert found[what] in ("PermissionError", "FileNotFoundError")


def test_it_inherits_nothing_of_the_operator_s_environment(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    own = {"HOME", "TMPDIR", "FLWR_HOME", "PATH", *environment.SET, *environment.LOCALE}
    for found in loot[0]:
        names = {name for name in found["environment"].split() if not name.startswith("LC_")}
        assert names - own <= SET_BY_FLOWER


@pytest.mark.skipif(landlock.version() < confine.PORTS, reason="this kernel's Landlock has no rules for ports")
@pytest.mark.parametrize("what", ["metrics", "port", "multipath"])
def test_it_connects_to_no_other_program(loot: tuple[list[dict[str, str]], Workspace], what: str) -> None:
    assert {found[what] for found in loot[0]} == {"PermissionError"}


@pytest.mark.skipif(
    os.geteuid() != 0 and landlock.version() < confine.SIGNALS, reason="this kernel's Landlock has no rules for signals"
)
def test_it_kills_no_worker(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    assert {found["kill"] for found in loot[0]} == {"PermissionError"}


def test_it_reaches_no_agent_of_the_operator(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    measures = confine.means()
    if not (measures.view or measures.user or measures.landlock >= confine.SOCKETS):
        pytest.skip("nothing here keeps it from connecting to sockets by their path")
    assert {found["agent"] for found in loot[0]} <= {"PermissionError", "FileNotFoundError"}


def test_it_gets_no_upload(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    for found in loot[0]:
        assert found["bare"] == "UNAVAILABLE"
        assert found["forged"] == "UNAVAILABLE"
        assert found["ticket"] == "abstain"
    log = (loot[1].run_dir / "logs" / "shuffler.log").read_text()
    assert '"accepted"' not in log


def test_the_worker_survives_nonsense_on_its_socket(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    """The ticket above was answered after the nonsense had been sent."""
    for found in loot[0]:
        assert found["nonsense"] in ("closed", "ConnectionResetError")
