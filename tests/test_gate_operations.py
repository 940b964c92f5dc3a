"""What the gate shows the SuperLink's operator: who joined, who was refused and why, and the traffic."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy import commands
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.processes import Fleet
from fl_privacy.identity.pki import Authority
from fl_privacy.identity.tls import LocalKeys
from fl_privacy.ops import metrics
from fl_privacy.ops.log import Log
from gates import FLEET, Echo, Front, ask, dial, post, rest
from helpers import START, Keys, eventually
from server_app.loop import Coordinator


class Watched(Front):
    """A gate with metrics and an event log."""

    scraped = ""
    file = Path()

    def scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.scraped}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def rejects(self) -> dict[tuple[str, str], float]:
        found = {}
        for name, value in self.scrape().items():
            if name.startswith("fl_privacy_rejects_total"):
                _, code, _, field, _ = name.split('"')
                found[code, field] = value
        return found

    def kept(self, event: str) -> list[dict[str, Any]]:
        return [found for line in self.file.read_text().splitlines() if (found := json.loads(line))["event"] == event]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Watched]:
    local = LocalKeys.open(tmp_path / "local", "superlink")
    echo = Echo(local)
    front = Watched(Keys(tmp_path / "keys"), Fleet(tmp_path / "logs", tmp_path / "pids"), echo.address, local)
    front.file = tmp_path / "kept" / "events.jsonl"
    try:
        front.start("127.0.0.1:0", "--metrics", "127.0.0.1:0", "--events", str(front.file))
        front.scraped = str(front.fleet.wait_for("gate", "metrics", START)["address"])
        yield front
    finally:
        front.fleet.stop()
        echo.close()


def test_callers_are_counted_and_logged_with_the_reason_for_their_refusal(gate: Watched, tmp_path: Path) -> None:
    authority = gate.keys.of("site", "site-0").authority_file
    with gate.dial("site", "site-0") as sock:
        assert ask(sock, post(FLEET, 1000), b"x" * 1000)[0] == 200
        found = gate.scrape()
        assert (found["fl_privacy_open_connections"], found["fl_privacy_connections_total"]) == (1, 1)
        assert found['fl_privacy_bytes_total{direction="in"}'] > 1000
        assert found['fl_privacy_bytes_total{direction="out"}'] > 50
        assert ask(sock, post("/v1/control/start-run"))[0] == 403
    with gate.dial("site", "site-0") as sock:  # as `preflight` does, to compare clocks: not logged as a refusal
        assert ask(sock, "GET / HTTP/1.1\nHost: gate\n\n")[0] == 403
    with gate.dial("shuffler") as sock:
        assert rest(sock).startswith(b"HTTP/1.1 403")
    strangers = [Keys(tmp_path / "other").of("site", "site-0"), gate.keys.expired("site", "late"), None]
    for keys in strangers:
        with suppress(ssl.SSLError), dial(gate.address, authority, keys) as sock:
            ask(sock, post(FLEET))
    guest = Keys(gate.keys.folder, "elsewhere").of("site", "guest")
    gone = gate.keys.of("site", "gone")
    gate.keys.authority.revoke("fl-privacy://test/site/gone")
    shutil.copy(gate.keys.authority.revoked_file, gate.keys.of("superlink", "superlink").revoked_file)
    for keys in (guest, gone):
        with dial(gate.address, keys.authority_file, keys) as sock:
            assert rest(sock) == b""
    wanted = {
        ("PERMISSION_DENIED", "request"): 1,
        ("UNAUTHENTICATED", "foreign"): 1,
        ("UNAUTHENTICATED", "expired"): 1,
        ("UNAUTHENTICATED", "handshake"): 1,
        ("PERMISSION_DENIED", "foreign"): 1,
        ("PERMISSION_DENIED", "role"): 1,
        ("PERMISSION_DENIED", "revoked"): 1,
    }
    eventually(lambda: gate.rejects() == wanted, 10)
    eventually(lambda: gate.scrape()["fl_privacy_open_connections"] == 0, 10)
    assert [event["identity"] for event in gate.kept("joined")] == ["fl-privacy://test/site/site-0"]
    reasons = [event["reason"] for event in gate.kept("refused")]
    for part in ("may not send", "local issuer", "has expired", "DID_NOT_RETURN", "'elsewhere'", "gone: revoked"):
        assert sum(part in reason for reason in reasons) == 1
    assert [event["reason"] for event in gate.events("refused")] == reasons  # also in gate.log


def test_a_kit_s_gate_is_scraped_at_the_kit_s_address_and_shares_its_event_log(tmp_path: Path) -> None:
    hosts = {"superlink": "127.0.0.1:9", "shuffler": "127.0.0.1:9"}
    made = Federation.model_validate({"name": "kits", "sites": 3, "route": {"kind": "shuffler"}, "hosts": hosts})
    provision(made, tmp_path / "kits", Authority.open(tmp_path / "ca"), sign=True)
    folder = Folder.open(tmp_path / "kits" / "superlink")
    _, gate = commands.processes(folder.place, commands.Ports.free())
    options = dict(zip(gate.command, gate.command[1:], strict=False))
    assert (options["--metrics"], options["--events"]) == ("127.0.0.1:9464", str(folder.logs / "events.jsonl"))


def test_unavailable_metrics_are_reported_and_stop_nobody(tmp_path: Path) -> None:
    """Not even a run: the server has metrics only while one is running."""
    log = Log("server", tmp_path / "server.log")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server: Any = SimpleNamespace(log=log, plan=SimpleNamespace(metrics=address, run="r"))
        assert Coordinator._make_metrics(server) is metrics.OFF
    (event,) = map(json.loads, (tmp_path / "server.log").read_text().splitlines())
    assert event["event"] == "metrics-failing"
    assert event["reason"].startswith(f"metrics {address}: in use, or not an address of this machine; choose another")


def test_a_gate_whose_metrics_port_is_taken_still_serves(gate: Watched, tmp_path: Path) -> None:
    other = Front(gate.keys, Fleet(tmp_path / "logs2", tmp_path / "pids2"), gate.superlink, gate.local)
    try:
        other.start("127.0.0.1:0", "--metrics", gate.scraped)
        assert len(other.events("metrics-failing")) == 1
        with other.dial("site") as sock:
            assert ask(sock, post(FLEET))[0] == 200
    finally:
        other.fleet.stop()
