"""A middleware process that cannot start prints the reason in one line and exits with 2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fl_privacy.deploy import flower
from fl_privacy.deploy.engines import follow as following
from fl_privacy.deploy.preflight import checks
from fl_privacy.deploy.processes import Fleet
from fl_privacy.identity.keyring import Identity
from fl_privacy.identity.pki import Authority


def start(tmp_path: Path, config: str, listen: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "c.yaml"
    path.write_text(config)
    keys = Authority.open(tmp_path / "pki").issue(
        Identity("here", "shuffler", "shuffler"), tmp_path / "k", ["127.0.0.1"]
    )
    command = [sys.executable, "-m", "shuffler_app", "--config", str(path), "--keys", str(keys.folder)]
    command += ["--state", str(tmp_path / "state")]
    return subprocess.run([*command, "--listen", listen], capture_output=True, text=True, timeout=60)


def reason(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return str(json.loads(done.stderr.strip().splitlines()[-1])["reason"])


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in reason(start(tmp_path, "name: here\nsites: 3", address))


def test_a_config_without_a_shuffler_is_named(tmp_path: Path) -> None:
    done = start(tmp_path, "name: here\nsites: 3\nroute: {kind: shards}", "127.0.0.1:0")
    assert "route.kind" in reason(done)


def test_preflight_explains_what_grpc_calls_unavailable(tmp_path: Path) -> None:
    """Certificates from one authority pass. From two, each side's refusal is distinguished from the other's."""
    ours, theirs = Authority.open(tmp_path / "pki"), Authority.open(tmp_path / "other")
    site = Identity("here", "site", "site-0")
    (tmp_path / "c.yaml").write_text("name: here\nsites: 3")
    keys = ours.issue(Identity("here", "shuffler", "shuffler"), tmp_path / "k", ["127.0.0.1"])
    fleet = Fleet(tmp_path / "logs", tmp_path / "pids.json")
    try:
        command = [
            sys.executable,
            "-m",
            "shuffler_app",
            "--state",
            str(tmp_path / "state"),
            "--config",
            str(tmp_path / "c.yaml"),
            "--keys",
            str(keys.folder),
        ]
        fleet.start("shuffler", command)
        address = fleet.wait_for("shuffler", "listening", 60)["address"]
        good = checks.peer(address, ours.issue(site, tmp_path / "good"))
        stranger = theirs.issue(site, tmp_path / "stranger")
        distrusting = checks.peer(address, stranger)
        stranger.authority_file.write_bytes(ours.pem)
        distrusted = checks.peer(address, stranger)
    finally:
        fleet.stop()
    gone = checks.peer(address, ours.issue(site, tmp_path / "good"))
    assert good.ok, good.detail
    assert "we refused its certificate" in distrusting.detail
    assert "refused our certificate" in distrusted.detail
    assert not gone.ok
    assert all(check.fix for check in (distrusting, distrusted, gone))


class Finished:
    """A SuperLink whose run has failed."""

    def status(self, run: int) -> flower.Status:
        return flower.Status("finished", "failed", "it did not come up")


@pytest.mark.parametrize(
    ("log", "end"),
    [
        ('{"time":1,"event":"waiting"}\n', ("failed", "it did not come up")),
        ('{"time":1,"event":"completed"}\n', ("completed", "")),
        ('{"time":1,"event":"failed","reason":"no quorum"}\n', ("failed", "no quorum")),
    ],
)
def test_the_result_of_a_run_comes_from_its_server_or_else_from_flower(
    log: str, end: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "STATUS_EVERY", 0.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text(log)
    submitted = following.Submitted(Finished(), 1, lambda: 2, tmp_path / "server.lock")
    assert following.Follower(tmp_path, submitted, lambda: None).end() == end
