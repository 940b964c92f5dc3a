"""One table defines the roles: kits and the local engine start the same commands, and a new role is one entry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.config import Federation, ShufflerRoute
from fl_privacy.deploy import commands
from fl_privacy.deploy.commands import Ports, processes
from fl_privacy.deploy.engines import compose
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.kits import kit_files
from fl_privacy.deploy.kits.kit import Folder, Kit
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.parties import observers, parties
from fl_privacy.identity.keyring import Identity
from fl_privacy.ops.scrape import Prometheus
from fl_privacy.roles import ROLES, Role
from kits import HERE, federation

SHARDS: dict[str, Any] = {"route": {"kind": "shards", "aggregators": 2, "n_min": 2}}
ADDRESSES = {
    "superlink": f"{HERE}:1",
    "shuffler": f"{HERE}:2",
    "aggregators": [f"{HERE}:3", f"{HERE}:4"],
    "evaluator": f"{HERE}:5",
}
MIX = Role(
    "mix",
    module="mix_app",
    options=("index", "listen", "view"),
    numbered=True,
    serves="middleware",
    backup=("state",),
    records="views",
    outcomes=("released",),
    gauges=("rounds",),
)


@contextmanager
def local(made: Federation, folder: Path) -> Iterator[Workspace]:
    workspace = Workspace(made, "a-run", folder / "runs", None)
    try:
        yield workspace
    finally:
        workspace.clear()


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")} - {"--metrics", "--events"}


@pytest.mark.parametrize("name", ROLES)
def test_everything_the_table_names_exists(name: str) -> None:
    role, services = ROLES[name], {role.serves for role in ROLES.values()}
    assert role.name == name
    assert bool(role.module) >= (not role.flower)
    assert not role.module or find_spec(role.module)
    assert set(role.options) <= commands._OPTIONS.keys()
    assert role.flower in commands._FLOWER
    assert set(role.dials) <= services - {""}
    assert role.records in ("", "views", "truth")
    assert bool(role.apis) == ("superlink" in role.dials)


@pytest.mark.parametrize("changes", [{}, SHARDS], ids=["shuffler", "shards"])
def test_a_kit_and_the_local_engine_start_the_same_commands(changes: dict[str, Any], tmp_path: Path) -> None:
    made = federation(2, audit=True, hosts=ADDRESSES, **changes)
    provision(made, tmp_path / "kits")
    with local(made, tmp_path) as workspace:
        workspace.addresses |= {"superlink": [f"{HERE}:1"], "middleware": [f"{HERE}:2"], "evaluator": [f"{HERE}:5"]}
        for role, name in parties(made):
            folder = Folder.open(tmp_path / "kits" / name)
            there = {process.name: process for process in processes(folder.place, Ports.free())}
            for process in processes(workspace.place(role, name), Ports.free()):
                other = there[process.name]
                assert (process.announces, process.confined) == (other.announces, other.confined)
                assert process.env.keys() == other.env.keys()
                if not ROLES[role].has_gate:  # behind a gate, the SuperLink does not run the ServerApp itself
                    assert flags(process.command) - {"--trial"} == flags(other.command)


def test_audited_processes_record_under_the_run_s_name(tmp_path: Path) -> None:
    with local(federation(2, audit=True, hosts=ADDRESSES, **SHARDS), tmp_path) as workspace:
        for role, name in [("aggregator", "aggregator-1"), ("evaluator", "evaluator")]:
            (process,) = processes(workspace.place(role, name), Ports.free())
            view = process.command[process.command.index("--view") + 1]
            assert view == str(workspace.runs_dir / "{run}" / "views" / name)


def test_a_new_kind_of_process_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLES, "mix", MIX)
    monkeypatch.setattr(ShufflerRoute, "parties", lambda _: [("mix", "mix-0"), ("mix", "mix-1")])
    made = federation(2, audit=True, hosts=None)
    assert list(observers(made)) == ["server", "mix-0", "mix-1"]
    with local(made, tmp_path) as workspace:
        (process,) = processes(workspace.place("mix", "mix-1"), Ports.free())
    assert process.command[1:3] == ["-m", "mix_app"]
    assert re.search("--index 1 .*--view .*/views/mix-1", " ".join(process.command))
    services = compose.document(made, Path("f.yaml"), "image", "a-run")["services"]
    assert services["mix-0"]["networks"] == ["sites", "core"]
    assert {"mix-0", "mix-1", "superlink"} <= set(services["site-0"]["depends_on"])
    assert [role for role, _ in compose.mounted(made, _folders(tmp_path, *services))].count("mix") == 2
    kit = Kit(federation=made.name, digest=made.digest, role="mix", name="mix-1", listen=f"{HERE}:1")
    assert not Folder(tmp_path, kit, made).idle
    assert "`state`" in kit_files.readme(kit)
    assert Identity.parse("fl-privacy://kits/mix/mix-1").role == "mix"
    assert b'outcome="released"' in Prometheus("mix", "mix-1").text()


def _folders(folder: Path, *names: str) -> Path:
    for name in names:
        if name != "init":
            (folder / "mounted" / name).mkdir(parents=True)
    return folder / "mounted"


def test_a_role_that_the_route_does_not_use_is_idle(tmp_path: Path) -> None:
    everybody: list[tuple[str, str]] = [("shuffler", "shuffler"), ("aggregator", "aggregator-0")]
    made: Federation = federation(2)
    provision(made, tmp_path / "kits", roles=[*parties(made), *everybody[1:]])
    assert not Folder.open(tmp_path / "kits" / "shuffler").idle
    assert Folder.open(tmp_path / "kits" / "aggregator-0").idle
