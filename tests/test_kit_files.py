"""The compose file and the systemd unit of a kit: they match kit.yaml, and their owner's changes are kept."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import cli, json_of
from fl_privacy.deploy.kits import kit_files
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from kits import POLICY, change, federation, write


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    provision(federation(), tmp_path / "kits")
    return tmp_path / "kits"


def service(kit: Path) -> dict[str, Any]:
    whole = yaml.safe_load((kit / "compose.yml").read_text())
    assert whole["name"] == f"fl-privacy-{kit.name}"
    found: dict[str, Any] = whole["services"][kit.name]
    return found


def mounts(kit: Path) -> dict[str, bool]:
    """Maps each source to whether it is writable."""
    made = [mount for mount in service(kit)["volumes"] if isinstance(mount, dict)]
    assert all(mount["source"] == mount["target"] and not mount["bind"]["create_host_path"] for mount in made)
    return {mount["source"]: not mount.get("read_only") for mount in made}


def test_a_site_with_a_gpu_data_and_a_policy_has_them_in_its_container(kits: Path) -> None:
    kit = kits / "site-0"
    assert mounts(kit) == {}
    change(kit, device="cuda:1", data="/srv/data")
    (kit / "policy.yaml").symlink_to("/etc/fl/policy.yaml")
    assert cli("refresh", kit).returncode == 0
    found = service(kit)
    assert mounts(kit) == {"/srv/data": False, "/etc/fl/policy.yaml": False}
    (device,) = found["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", ["1"], ["gpu"])
    assert found["command"] == ["serve", "/kit", "--device", "cuda"]
    assert found["image"] == "fl-privacy:${TORCH:-cuda}"


def test_data_inside_the_kit_need_no_mount(kits: Path) -> None:
    change(kits / "site-0", data="data")
    (kits / "site-0" / "policy.yaml").write_text(POLICY)
    kit_files.write(Folder.open(kits / "site-0"))
    assert mounts(kits / "site-0") == {}


def test_a_shared_ledger_can_be_written_in_containers_and_units(kits: Path) -> None:
    kit = kits / "site-0"
    (kit / "policy.yaml").write_text("epsilon_per_round: 1\nepsilon: 2\ntasks: [digits]\nledger: /srv/ledgers/icu\n")
    kit_files.write(Folder.open(kit))
    assert mounts(kit) == {"/srv/ledgers/icu": True}
    unit = (kit / "fl-privacy-site-0.service").read_text()
    assert "ReadWritePaths=/srv/fl-privacy/site-0 /srv/ledgers/icu\n" in unit


def test_containers_of_all_kits_are_locked_down_and_their_logs_bounded(kits: Path) -> None:
    for kit in kits.iterdir():
        found = service(kit)
        assert found["restart"] == ("no" if kit.name == "server" else "unless-stopped")
        assert found["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
        assert (found["read_only"], found["cap_drop"]) == (True, ["ALL"])
        assert ("ports" in found) == (kit.name in ("superlink", "shuffler"))


def test_a_server_reads_its_data_and_writes_its_runs(tmp_path: Path) -> None:
    choices = Choices(data=Path("/srv/data"), runs=Path("/srv/runs"))
    provision(federation(), tmp_path / "kits", choices=choices)
    kit = tmp_path / "kits" / "server"
    assert mounts(kit) == {"/srv/data": False, "/srv/runs": True}
    unit = (kit / "fl-privacy-server.service").read_text()
    assert "ReadWritePaths=/srv/fl-privacy/server /srv/runs\n" in unit
    assert "Type=oneshot\n" in unit
    assert "fl-privacy train /srv/fl-privacy/server\n" in unit


def test_a_unit_sees_data_in_a_home_folder(kits: Path) -> None:
    unit = kits / "site-0" / "fl-privacy-site-0.service"
    assert "ProtectHome=yes\n" in unit.read_text()
    change(kits / "site-0", data="/home/me/data")
    kit_files.write(Folder.open(kits / "site-0"))
    assert "ProtectHome=read-only\n" in unit.read_text()


def test_systemd_accepts_the_units(kits: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    for kit in ("server", "site-0"):
        unit = tmp_path / f"fl-privacy-{kit}.service"
        unit.write_text((kits / kit / unit.name).read_text().replace(kit_files.PROGRAM, "/bin/true"))
        done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True)
        assert unit.name not in done.stderr, done.stderr


def test_changes_by_hand_are_kept_and_reported(kits: Path, tmp_path: Path) -> None:
    mine = kits / "site-0" / "compose.yml"
    mine.write_text(mine.read_text().replace("unless-stopped", "always"))
    before = mine.read_text()
    change(kits / "site-1", data="/srv/data")
    config = write(tmp_path, federation(4))
    done = cli("provision", config, "--out", kits, "--json")
    assert (done.returncode, json_of(done)["kept"]) == (0, [str(mine)])
    assert mine.read_text() == before
    assert mounts(kits / "site-1") == {"/srv/data": False}  # this one was not changed
    plain = cli("provision", config, "--out", kits)
    told = [line for line in plain.stdout.splitlines() if line.startswith("kept ")]
    assert len(told) == 1
    assert f"{mine}: edited by hand; delete it" in told[0]
    mine.unlink()
    assert json_of(cli("refresh", kits / "site-0", "--json"))["kept"] == []
    assert service(kits / "site-0")["restart"] == "unless-stopped"
