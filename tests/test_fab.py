"""Anyone who can submit a run ships code to the sites. That code reaches no data, no keys and no upload."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy import confine
from fl_privacy.deploy.engines import local
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.plan import new_run_name

HOSTILE = Path(__file__).parent / "hostile_app"
CONFIG = "name: victim\nsites: 3\nrounds: 1\ndeadline: 6\ntask: {train: {epochs: 1}}"
SECRET = b"patient record 4711"


@pytest.fixture(scope="module")
def loot(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Workspace]:
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
        control, _ = local.start(workspace, app)
        facts = {"private": str(workspace.private), "middleware": workspace.middleware, "digest": federation.digest}
        (workspace.private / "hostile.json").write_text(json.dumps({**facts, "out": str(out)}))
        until = time.monotonic() + 120
        while not out.exists() and time.monotonic() < until:
            workspace.fleet.check()
            time.sleep(0.2)
        control.close()
    finally:
        workspace.clear()
    assert out.exists(), "the hostile run did not finish"
    return json.loads(out.read_text()), workspace


def test_the_hostile_code_did_run(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    assert len(loot[0]) == 3
    assert all(found["whose"] == "the FAB's" for found in loot[0])


@pytest.mark.skipif(
    os.geteuid() != 0 and not confine.version(), reason="without root or Landlock nothing separates the processes"
)
def test_it_reads_neither_keys_nor_data(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    for found in loot[0]:
        assert found["listed"] == "PermissionError"
        assert found["key"] == "PermissionError"
        assert found["authority"] == "PermissionError"
        assert found["data"] == "PermissionError"
        # A confined app does not even find the worker's process.
        assert found["memory"] in ("PermissionError", "FileNotFoundError")


def test_it_gets_no_upload(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    for found in loot[0]:
        assert found["bare"] == "UNAVAILABLE"
        assert found["forged"] == "UNAVAILABLE"
        assert found["ticket"] in ("refused", "failed")
    log = (loot[1].run_dir / "logs" / "shuffler.log").read_text()
    assert '"accepted"' not in log


def test_the_worker_survives_nonsense_on_its_socket(loot: tuple[list[dict[str, str]], Workspace]) -> None:
    """The ticket above was answered after the nonsense had been sent."""
    for found in loot[0]:
        assert found["nonsense"] in ("closed", "ConnectionResetError")
