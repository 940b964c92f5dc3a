"""The relay connects Flower programs to the gate with a party's certificate, also through a proxy, or says why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.addresses import free_port, parse
from fl_privacy.deploy import flower
from fl_privacy.deploy.processes import Fleet
from fl_privacy.dialling import proxy_address
from fl_privacy.errors import LaunchError
from fl_privacy.gate import listener, relay
from fl_privacy.gate.dial import Gateway
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.tls import LocalKeys
from fl_privacy.ops.log import Log
from fl_privacy.ops.tail import Tail
from gates import FLEET, Background, Echo, Front, Proxy, ask, dial, post, rest
from helpers import START, Keys

CONTROL = "/v1/control/list-runs"


class Relays:
    """Relays, each with its own folder and log."""

    def __init__(self, front: Front, folder: Path) -> None:
        self.front, self._folder = front, folder
        self.background = Background()

    def start(self, name: str, keys: Keyring, target: str = "", proxy: str = "") -> str:
        """Start a relay in this process."""
        way = proxy_address(proxy) if proxy else None
        gateway = Gateway.of(parse(target or self.front.address), keys, way)
        local = LocalKeys.open(self._folder / name, "relay")
        log = Log("relay", self._folder / name / "log")
        return self.background.serve(relay.Relay(gateway, local, log).handle, log)

    def launch(self, name: str, keys: Keyring, listen: str = "127.0.0.1:0") -> str:
        """Start a relay in its own process."""
        self.front.fleet.start(name, flower.relay(self.front.address, keys, self._folder / name, listen))
        return str(self.front.fleet.wait_for(name, "listening", START)["address"])

    def certificate(self, name: str) -> Path:
        return self._folder / name / "relay.pem"

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [e for e in Tail(self._folder / name / "log").poll() if e["event"] == event]

    def ask(self, name: str, address: str, path: str = FLEET) -> tuple[int, bytes]:
        with dial(address, self.certificate(name), None) as sock:
            return ask(sock, post(path))

    def refused(self, name: str, address: str) -> dict[str, Any]:
        """Try three times without an answer; returns the single event that says why."""
        for _ in range(3):
            with dial(address, self.certificate(name), None) as sock:
                sock.sendall(post(FLEET).replace("\n", "\r\n").encode())
                assert rest(sock) == b""
        events = self.events(name, "unreachable")
        assert len(events) == 1, events
        assert self.events(name, "failed") == []
        return events[0]


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relays]:
    folder = tmp_path_factory.mktemp("relay")
    local = LocalKeys.open(folder / "local", "superlink")
    echo = Echo(local)
    front = Front(Keys(folder / "keys"), Fleet(folder / "logs", folder / "pids"), echo.address, local)
    try:
        front.start()
        found = Relays(front, folder / "relays")
        yield found
        found.background.close()
    finally:
        front.fleet.stop()
        echo.close()


def test_bytes_pass_both_ways_with_the_party_s_certificate(relays: Relays) -> None:
    site = relays.start("site", relays.front.keys.of("site", "clinic"))
    server = relays.start("server", relays.front.keys.of("server", "server"))
    assert relays.ask("site", site)[0] == 200
    assert relays.ask("site", site, CONTROL)[0] == 403
    assert relays.ask("server", server, CONTROL)[0] == 200
    assert "fl-privacy://test/site/clinic" in [e["identity"] for e in relays.front.events("joined")]
    body = os.urandom(5_000_000)
    with dial(site, relays.certificate("site"), None) as sock:
        for _ in range(2):
            code, said = ask(sock, post(FLEET, len(body)), body)
            assert (code, json.loads(said)["size"]) == (200, len(body))
    assert len(relays.events("site", "connected")) == 1
    key = relays.certificate("site").with_suffix(".key")
    assert key.stat().st_mode & 0o777 == 0o600


def test_through_a_proxy(relays: Relays) -> None:
    proxy = Proxy()
    address = relays.start("proxied", relays.front.keys.of("site", "clinic"), proxy=proxy.url)
    assert relays.ask("proxied", address)[0] == 200
    assert proxy.asked == [relays.front.address]
    proxy.close()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "answered 403 to CONNECT"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "answered 407"),
        (b"nonsense\r\n\r\n", "not HTTP"),
        (b"a" * 20_000, "not HTTP"),
        (b"", "not HTTP"),
    ],
    ids=["403", "407", "nonsense", "endless", "empty"],
)
def test_a_proxy_that_refuses_is_named(
    relays: Relays, reply: bytes, reason: str, request: pytest.FixtureRequest
) -> None:
    proxy = Proxy(reply)
    name = request.node.callspec.id
    event = relays.refused(name, relays.start(name, relays.front.keys.of("site", "clinic"), proxy=proxy.url))
    assert event["cause"] == "proxy"
    assert reason in event["reason"]
    proxy.close()


def test_why_the_gate_is_unreachable_is_logged_once(relays: Relays, tmp_path: Path) -> None:
    front = relays.front
    site, foreign = front.keys.of("site", "clinic"), Keys(tmp_path / "foreign")
    # It trusts our authority, so only the gate can object.
    stranger = front.keys.equip(foreign.of("site", "stranger"))
    shutil.copy(site.authority_file, stranger.authority_file)
    far = front.keys.authority.issue(Identity("test", "superlink", "far"), tmp_path / "far", ("far.example",))
    revoked = front.keys.of("site", "gone")
    front.keys.authority.revoke(Identity("test", "site", "gone").uri)
    shutil.copy(front.keys.authority.revoked_file, front.keys.of("superlink", "superlink").revoked_file)
    misnamed = Echo(LocalKeys(far.certificate_file, far.key_file))
    cases = [
        (site, "nowhere.invalid:1", "name", "name not found"),
        (site, f"127.0.0.1:{free_port()}", "refused", "nothing listens there"),
        (front.keys.expired("site", "late"), front.address, "our_certificate", "certificate expired"),
        (stranger, front.address, "our_certificate", "unknown ca"),
        (foreign.of("site", "other"), front.address, "their_certificate", "the superlink's certificate"),
        (site, misnamed.address, "their_certificate", "mismatch"),
        (Keys(front.keys.folder, "elsewhere").of("site", "guest"), front.address, "their_certificate", "'elsewhere'"),
        (revoked, front.address, "closed", "its log says why"),
    ]
    for number, (keys, target, cause, reason) in enumerate(cases):
        name = f"why-{number}"
        event = relays.refused(name, relays.start(name, keys, target))
        assert event["cause"] == cause, event
        assert reason in event["reason"]
    misnamed.close()


def test_only_a_superlink_is_accepted_as_one(relays: Relays, tmp_path: Path) -> None:
    """A shuffler's certificate from our authority and for the right host is still not a gate's."""
    keys = relays.front.keys
    impostor = Echo(
        LocalKeys(keys.of("shuffler", "impostor").certificate_file, keys.of("shuffler", "impostor").key_file)
    )
    event = relays.refused("impostor", relays.start("impostor", keys.of("site", "clinic"), impostor.address))
    assert event["cause"] == "their_certificate"
    assert "fl-privacy://test/shuffler/impostor answered" in event["reason"]
    assert impostor.seen == []
    impostor.close()


def test_a_restarted_relay_is_still_trusted(relays: Relays) -> None:
    keys = relays.front.keys.of("site", "clinic")
    address = relays.launch("again", keys)
    before = relays.certificate("again").read_bytes()
    relays.front.fleet.stop("again")
    assert relays.launch("again", keys, address) == address
    assert relays.certificate("again").read_bytes() == before
    assert relays.ask("again", address)[0] == 200
    child = relays.front.fleet.children["again"].process
    child.terminate()
    assert child.wait(10) == 0
    del relays.front.fleet.children["again"]


def test_a_renewed_certificate_is_used_without_a_restart(relays: Relays) -> None:
    keys = relays.front.keys.expired("site", "renewing")
    address = relays.start("renewing", keys)
    assert relays.refused("renewing", address)["cause"] == "our_certificate"
    fresh = relays.front.keys.of("site", "renewed")
    shutil.copy(fresh.key_file, keys.key_file)
    shutil.copy(fresh.certificate_file, keys.certificate_file)
    assert relays.ask("renewing", address)[0] == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_programs_of_another_user_are_refused(relays: Relays) -> None:
    """Otherwise the relay would lend the party's identity to anyone who connects."""
    address = relays.start("mine", relays.front.keys.of("site", "clinic"))
    port = address.rpartition(":")[2]
    command = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port} && timeout 1 cat <&3"]
    hung_up, waited = 0, 124
    assert subprocess.run(command, timeout=20, user=54321, cwd="/").returncode == hung_up
    assert subprocess.run(command, timeout=20, cwd="/").returncode == waited
    assert relays.ask("mine", address)[0] == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"--listen": "0.0.0.0:0"}, "loopback only"),
        ({"--listen": "[::]:0"}, "loopback only"),
        ({"--target": "gate"}, "must be HOST:PORT"),
        ({"--keys": "/nowhere"}, "/nowhere/cert.pem"),
        ({"--proxy": "http://user:hush@proxy:1"}, "does not belong on a command line"),
        ({"--proxy": "https://proxy:1"}, "must be http://host:port"),
        ({"--proxy": "proxy"}, "must be http://host:port"),
        ({"--certificates": "/proc/nowhere"}, "choose a writable folder"),
    ],
)
def test_bad_arguments_are_one_event_and_exit_code_2(
    relays: Relays,
    tmp_path: Path,
    changes: dict[str, str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = relays.front.keys.of("site", "clinic")
    options = {"--target": "127.0.0.1:1", "--keys": str(keys.folder), "--certificates": str(tmp_path), **changes}
    monkeypatch.setattr(sys, "argv", ["relay", *(text for pair in options.items() for text in pair)])
    assert listener.run("relay", relay.main) == 2
    said = capsys.readouterr().err
    event = json.loads(said)
    assert event["event"] == "error"
    assert reason in event["reason"]
    assert "hush" not in said


def test_a_proxy_s_address_is_parsed() -> None:
    assert proxy_address("http://proxy.example:3128") == ("proxy.example", 3128)
    with pytest.raises(LaunchError, match="not a URL"):
        proxy_address("http://proxy:99999")
