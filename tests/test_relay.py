"""The relay: it takes Flower programs to the gate with a party's certificate, also through a proxy, or says why not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.errors import LaunchError
from fl_privacy.launch import flower
from fl_privacy.launch.ground import free_port
from fl_privacy.launch.processes import Fleet
from fl_privacy.wire import listener, relay
from fl_privacy.wire.dial import proxy_address
from fl_privacy.wire.identity import Keyring
from fl_privacy.wire.tls import LocalKeys
from gates import FLEET, Echo, Front, ask, dial, post, rest
from helpers import START, Keys

CONTROL = "/v1/control/list-runs"


class Proxy:
    """An HTTP proxy that knows CONNECT and nothing else; `asked` is what it was asked for."""

    def __init__(self, reply: bytes = b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n") -> None:
        self.asked: list[str] = []
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            head = b""
            while b"\r\n\r\n" not in head:
                head += sock.recv(4096)
            self.asked.append(head.split()[1].decode())
            sock.sendall(self._reply)
            if b" 200 " not in self._reply:
                return
            host, _, port = self.asked[-1].rpartition(":")
            with socket.create_connection((host, int(port))) as other:
                threads = [threading.Thread(target=self._copy, args=ends, daemon=True) for ends in ((sock, other),)]
                threads[0].start()
                self._copy(other, sock)

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class Relays:
    """Relay processes, each with a folder and a log of its own."""

    def __init__(self, front: Front, folder: Path) -> None:
        self.front, self._folder = front, folder

    def start(self, name: str, keys: Keyring, target: str = "", proxy: str = "", listen: str = "127.0.0.1:0") -> str:
        command = flower.relay(target or self.front.address, keys, self._folder / name, listen, proxy)
        self.front.fleet.start(name, command)
        return str(self.front.fleet.wait_for(name, "listening", START)["address"])

    def certificate(self, name: str) -> Path:
        return self._folder / name / "relay.pem"

    def ask(self, name: str, address: str, path: str = FLEET) -> tuple[int, bytes]:
        with dial(address, self.certificate(name), None) as sock:
            return ask(sock, post(path))

    def refused(self, name: str, address: str) -> dict[str, Any]:
        """Three tries, none answered; the one event that says why."""
        for _ in range(3):
            with dial(address, self.certificate(name), None) as sock:
                sock.sendall(post(FLEET).replace("\n", "\r\n").encode())
                assert rest(sock) == b""
        events = self.front.events("unreachable", name)
        assert len(events) == 1, events
        return events[0]


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relays]:
    folder = tmp_path_factory.mktemp("relay")
    local = LocalKeys.open(folder / "local", "superlink")
    echo = Echo(local)
    front = Front(Keys(folder / "keys"), Fleet(folder / "logs", folder / "pids"), echo.address, local)
    try:
        front.start()
        yield Relays(front, folder / "relays")
    finally:
        front.fleet.stop()
        echo.close()


def test_bytes_go_both_ways_with_the_partys_certificate(relays: Relays) -> None:
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
    assert len(relays.front.events("connected", "site")) == 1
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
        (b"nonsense\r\n\r\n", "no HTTP"),
        (b"a" * 20_000, "no HTTP"),
        (b"", "no HTTP"),
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


def test_why_the_gate_is_not_reached_is_said_once(relays: Relays, tmp_path: Path) -> None:
    front = relays.front
    site, foreign = front.keys.of("site", "clinic"), Keys(tmp_path / "foreign")
    port = front.address.rpartition(":")[2]
    # An authority of both, so that only the gate can object.
    stranger = foreign.of("site", "stranger")
    shutil.copy(site.authority_file, stranger.authority_file)
    elsewhere = Keys(front.keys.folder, "elsewhere").of("site", "guest")
    cases = {
        "name": (site, "nowhere.invalid:1", "name not found"),
        "refused": (site, f"127.0.0.1:{free_port()}", "nothing listens there"),
        "our_certificate": (front.keys.expired("site", "late"), front.address, "expired"),
        "their_certificate": (foreign.of("site", "other"), front.address, "self-signed|issuer"),
    }
    more = {
        "unknown": (stranger, front.address, "our_certificate"),
        "name-of-another": (site, f"127.0.0.2:{port}", "their_certificate"),
        "elsewhere": (elsewhere, front.address, "their_certificate"),
        "shuffler": (front.keys.of("shuffler", "shuffler"), front.address, "closed"),
    }
    found = {
        cause: relays.refused(cause, relays.start(cause, keys, where)) for cause, (keys, where, _) in cases.items()
    }
    assert {name: event["cause"] for name, event in found.items()} == {name: name for name in cases}
    for cause, (_, _, reason) in cases.items():
        assert any(part in found[cause]["reason"] for part in reason.split("|")), found[cause]
    other = {
        name: relays.refused(name, relays.start(name, keys, where))["cause"] for name, (keys, where, _) in more.items()
    }
    assert other == {name: cause for name, (_, _, cause) in more.items()}


def test_only_a_superlink_is_taken_for_one(relays: Relays, tmp_path: Path) -> None:
    """A shuffler's certificate is of our authority and of the right host, and still no gate."""
    keys = relays.front.keys
    impostor = Echo(
        LocalKeys(keys.of("shuffler", "impostor").certificate_file, keys.of("shuffler", "impostor").key_file)
    )
    event = relays.refused("impostor", relays.start("impostor", keys.of("site", "clinic"), impostor.address))
    assert event["cause"] == "their_certificate"
    assert "fl-privacy://test/shuffler/impostor answers" in event["reason"]
    assert impostor.seen == []
    impostor.close()


def test_a_restarted_relay_is_still_trusted(relays: Relays) -> None:
    keys = relays.front.keys.of("site", "clinic")
    address = relays.start("again", keys)
    before = relays.certificate("again").read_bytes()
    relays.front.fleet.stop("again")
    assert relays.start("again", keys, listen=address) == address
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
def test_another_users_programs_are_turned_away(relays: Relays) -> None:
    """The relay would speak for the party to whoever dials it."""
    keys = Keyring(relays.front.keys.folder / "open")
    shutil.copytree(relays.front.keys.of("site", "clinic").folder, keys.folder)
    address = relays.start("mine", keys)
    host, _, port = address.rpartition(":")
    code = f"import socket; s = socket.create_connection(({host!r}, {port})); s.sendall(b'a'); print(s.recv(9))"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, user=54321, cwd="/")
    assert done.stdout.strip() == "b''" or "ConnectionResetError" in done.stderr, done
    assert relays.ask("mine", address)[0] == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"--listen": "0.0.0.0:0"}, "loopback only"),
        ({"--listen": "[::]:0"}, "loopback only"),
        ({"--target": "gate"}, "must be HOST:PORT"),
        ({"--keys": "/nowhere"}, "check --keys"),
        ({"--proxy": "http://user:word@proxy:1"}, "does not belong on a command line"),
        ({"--proxy": "https://proxy:1"}, "must be http://host:port"),
        ({"--proxy": "proxy"}, "must be http://host:port"),
        ({"--certificates": "/proc/nowhere"}, "can be written"),
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
    assert "word" not in said


def test_a_proxys_address() -> None:
    assert proxy_address("http://proxy.example:3128") == ("proxy.example", 3128)
    with pytest.raises(LaunchError, match="not a URL"):
        proxy_address("http://proxy:99999")
