"""The gate: who gets in, what each role may request, and that hostile callers get no further and cannot crash it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fl_privacy.deploy.processes import Fleet
from fl_privacy.gate import forward, gate, listener
from fl_privacy.identity.tls import LocalKeys
from fl_privacy.ops.log import Log
from gates import FLEET, Background, Echo, Front, answer, ask, dial, drip, post, rest, wait_closed
from helpers import Keys, eventually

CONTROL = "/v1/control/list-runs"
RUNTIME = "/v1/runtime/acquire-task"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalKeys:
    return LocalKeys.open(tmp_path_factory.mktemp("local"), "superlink")


@pytest.fixture(scope="module")
def echo(local: LocalKeys) -> Iterator[Echo]:
    echo = Echo(local)
    yield echo
    echo.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, echo: Echo, local: LocalKeys) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("gate")
    front = Front(Keys(folder / "keys"), Fleet(folder / "logs", folder / "pids"), echo.address, local)
    try:
        front.start()
        yield front
        assert front.fleet.children["gate"].process.poll() is None
        assert front.events("failed") == []
    finally:
        front.fleet.stop()


def status(front: Front, role: str, head: str) -> int:
    with front.dial(role) as sock:
        return ask(sock, head)[0]


@pytest.mark.parametrize(
    ("role", "head", "expected"),
    [
        ("site", post(FLEET), 200),
        ("site", post(CONTROL), 403),
        ("site", post(RUNTIME), 403),
        ("site", "GET /health HTTP/1.1\nHost: x\n\n", 403),
        ("site", f"GET {FLEET} HTTP/1.1\nHost: x\n\n", 403),
        ("server", post(FLEET), 200),
        ("server", post(CONTROL), 200),
        ("server", post(RUNTIME), 200),
        ("server", "GET /health HTTP/1.1\nHost: x\n\n", 200),
        ("server", "GET /docs HTTP/1.1\nHost: x\n\n", 403),
        ("server", "GET /openapi.json HTTP/1.1\nHost: x\n\n", 403),
        ("server", post("/health"), 403),
    ],
)
def test_a_role_reaches_only_its_own_apis(front: Front, role: str, head: str, expected: int) -> None:
    assert status(front, role, head) == expected


@pytest.mark.parametrize(
    "target",
    [
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "/v1/fleet%2f..%2fcontrol/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "//v1/control/list-runs",
        "/v1/fleet//x",
        "/v1/fleet/",
        "/v1/fleet",
        "/v1/fleet/x/../../control/list-runs",
        "/v1/fleet/x?y",
        "/v1/fleet/x#y",
        "/v1/fleet/x;y",
        "/v1/fleet\\..\\control",
        "/V1/FLEET/x",
        "/v1/fleetx/y",
        "https://127.0.0.1/v1/fleet/x",
        "http://127.0.0.1/v1/control/list-runs",
        "*",
        "127.0.0.1:443",
        "/",
    ],
)
def test_manipulated_targets_do_not_get_through(front: Front, echo: Echo, target: str) -> None:
    before = len(echo.seen)
    assert status(front, "site", post(target)) == 403
    assert len(echo.seen) == before


HOSTILE = [
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length: 4\nTransfer-Encoding: chunked\n\n0\n\n" + post(CONTROL),
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length: 4\nContent-Length: 5\n\nabcde",
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length: 4, 5\n\nabcde",
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length: +4\n\nabcd",
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length : 4\n\nabcd",
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length: 99999999999999999999999\n\nabcd",
    f"POST {FLEET} HTTP/1.1\nHost: x\nTransfer-Encoding: xchunked\n\n0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\nTransfer-Encoding: identity\n\n0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nTransfer-Encoding:\x0bchunked\n\n0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nHost: y\nContent-Length: 0\n\n",
    f"POST {FLEET} HTTP/1.1\nContent-Length: 0\n\n",
    f"POST {FLEET} HTTP/1.0\nHost: x\nContent-Length: 0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nExpect: 100-continue\nContent-Length: 4\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nConnection: upgrade\nUpgrade: websocket\nContent-Length: 0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nFlwr-Signature: a\nFlwr-Signature: b\nContent-Length: 0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nA: b\rC: d\nContent-Length: 0\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nA: b\0c\nContent-Length: 0\n\n",
    "CONNECT 127.0.0.1:80 HTTP/1.1\nHost: x\n\n",
    "PRI * HTTP/2.0\n\nSM\n\n",
    f"POST {FLEET}\n\n",
    "\x16\x03\x01 nonsense\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nA: {'a' * 70000}\n\n",
    f"POST /{'a' * 70000} HTTP/1.1\nHost: x\n\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\n" + "".join(f"A{i}: b\n" for i in range(9000)) + "\n",
    f"POST {FLEET} HTTP/1.1\nHost: x\nContent-Length: {forward.BODY_BYTES + 1}\n\n",
]


def test_hostile_http_is_refused_and_never_passed_on(front: Front, echo: Echo) -> None:
    def send(message: str) -> bytes:
        with front.dial("site") as sock:
            with suppress(OSError):  # refused before the whole message was sent
                sock.sendall(message.replace("\n", "\r\n").encode())
            return rest(sock)

    before = len(echo.seen)
    with ThreadPoolExecutor(8) as pool:
        said = dict(zip(HOSTILE, pool.map(send, HOSTILE), strict=True))
    for message, reply in said.items():
        assert not reply or reply.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501")), (message[:200], reply[:200])
        assert reply.count(b"HTTP/1.1 ") <= 1, message[:200]
    assert sum(not reply for reply in said.values()) <= 4
    assert len(echo.seen) == before
    assert status(front, "site", post(FLEET)) == 200


def test_a_bad_chunk_ends_the_request_without_an_answer_from_the_superlink(front: Front) -> None:
    with front.dial("site") as sock:
        head = f"POST {FLEET} HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\n\n"
        sock.sendall(head.replace("\n", "\r\n").encode() + b"4\r\nabcdX\r\n" + post(CONTROL).encode())
        assert b" 200 " not in rest(sock)


def test_a_pipelined_request_is_authorised_separately(front: Front, echo: Echo) -> None:
    before = len(echo.seen)
    with front.dial("site") as sock:
        sock.sendall((post(FLEET) + post(CONTROL) + post(FLEET)).replace("\n", "\r\n").encode())
        said = rest(sock)
    assert said.index(b"HTTP/1.1 200") < said.index(b"HTTP/1.1 403")
    assert said.count(b"HTTP/1.1 ") == 2
    assert len(echo.seen) == before + 1


def test_only_known_headers_are_passed_on(front: Front, echo: Echo) -> None:
    headers = [
        "Cookie: a",
        "X-Forwarded-For: b",
        "Flwr-Signature: c",
        "Connection: keep-alive, flwr-signature",
        "TE: d",
    ]
    assert status(front, "site", post(FLEET, 0, *headers)) == 200
    names = {name.lower() for name in echo.seen[-1][2]}
    assert names == {"host", "content-length", "flwr-signature"}
    assert echo.seen[-1][2]["host"] == echo.address


def test_connections_are_reused_and_bodies_arrive_whole(front: Front) -> None:
    with front.dial("site") as sock:
        for size in (0, 1, 70_000, 3_000_000):
            body = bytes(range(256)) * (size // 256 + 1)
            code, said = ask(sock, post(FLEET, size), body[:size])
            assert (code, json.loads(said)["digest"]) == (200, hashlib.sha256(body[:size]).hexdigest())


CHUNKED = f"POST {FLEET} HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\n\n".replace("\n", "\r\n").encode()
MEBIBYTE = b"%x\r\n" % (1 << 20) + bytes(1 << 20) + b"\r\n"


def test_a_large_body_is_streamed(front: Front) -> None:
    process = psutil.Process(front.fleet.children["gate"].process.pid)
    before = process.memory_info().rss
    with front.dial("site") as sock:
        sock.sendall(CHUNKED)
        for _ in range(40):
            sock.sendall(MEBIBYTE)
        sock.sendall(b"0\r\n\r\n")
        code, said = answer(sock)
        assert (code, json.loads(said)["size"]) == (200, 40 << 20)
    assert process.memory_info().rss - before < 16 << 20


def test_an_answer_is_streamed(front: Front, echo: Echo) -> None:
    echo.go.clear()
    with front.dial("server") as sock:
        sock.sendall(post("/v1/control/stream").replace("\n", "\r\n").encode())
        said = b""
        while b"first" not in said:
            said += sock.recv(4096)
        echo.go.set()
        while b"last" not in said:
            said += sock.recv(4096)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("foreign"))


def test_callers_without_a_valid_certificate_are_refused_with_a_tls_alert(front: Front, foreign: Keys) -> None:
    authority = front.keys.of("site", "site").authority_file
    strangers = {
        "unable to get local issuer certificate": foreign.of("site", "site"),
        "certificate has expired": front.keys.expired("site", "late"),
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": None,
    }
    for reason, keys in strangers.items():
        with pytest.raises(ssl.SSLError, match="ALERT"), dial(front.address, authority, keys) as sock:
            ask(sock, post(FLEET))
        eventually(lambda reason=reason: any(reason in e["reason"] for e in front.events("refused")))


def test_certificates_of_other_roles_and_federations_are_refused(front: Front) -> None:
    other = Keys(front.keys.folder, "elsewhere")
    cases = [front.keys.of(role, role) for role in ("shuffler", "aggregator", "evaluator", "superlink")]
    cases.append(other.of("site", "guest"))
    for keys in cases:
        with dial(front.address, keys.authority_file, keys) as sock:
            sock.sendall(post(FLEET).replace("\n", "\r\n").encode())
            answer = rest(sock)
            # Parties of its own federation receive the date, to compare clocks; others receive nothing.
            assert (answer == b"") == (keys is cases[-1])
            assert not answer or (answer.startswith(b"HTTP/1.1 403") and b"\r\ndate: " in answer.lower())
    refused = {e.get("identity"): e["reason"] for e in front.events("refused")}
    assert "shuffler may not use the SuperLink" in refused["fl-privacy://test/shuffler/shuffler"]
    assert "belongs to federation 'elsewhere'" in refused["fl-privacy://elsewhere/site/guest"]


def test_plain_text_and_probes_are_harmless(front: Front) -> None:
    host, _, port = front.address.rpartition(":")
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"a" * 70000):
        with socket.create_connection((host, int(port))) as sock, suppress(OSError):
            sock.sendall(said)
    assert status(front, "site", post(FLEET)) == 200


def test_half_open_connections_block_nobody_else_of_the_same_address(front: Front) -> None:
    """The oldest of them give way."""
    host, _, port = front.address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(3 * gate.HANDSHAKES_OF_ONE)]
    assert status(front, "site", post(FLEET)) == 200
    eventually(lambda: any("handshakes" in e["reason"] for e in front.events("refused")))
    for sock in idle:
        sock.close()


def test_of_too_many_handshakes_the_oldest_of_the_address_ends_or_else_the_oldest_of_all() -> None:
    async def scenario() -> list[str]:
        handshakes, ended = listener.Handshakes(of_one=2, in_all=3), []

        async def shake(name: str) -> None:
            try:
                async with handshakes.one(name[0]):
                    await asyncio.sleep(60)
            except TimeoutError:
                ended.append(name)

        tasks = []
        for name in ("a1", "b1", "a2", "a3", "c1"):
            tasks.append(asyncio.create_task(shake(name)))
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ended

    assert asyncio.run(scenario()) == ["a1", "b1"]


def test_a_party_joins_once_and_requests_are_not_logged(front: Front) -> None:
    for _ in range(3):
        assert status(front, "site", post(FLEET)) == 200
    joined = [e["identity"] for e in front.events("joined")]
    assert joined.count("fl-privacy://test/site/site") == 1
    log = front.fleet.children["gate"].log.read_text()
    assert "pull-messages" not in log
    assert "\n\n" not in log


def test_a_renewed_certificate_is_used_without_a_restart(front: Front) -> None:
    def shown() -> bytes | None:
        with front.dial("site") as sock:
            return sock.getpeercert(binary_form=True)

    keys, before = front.keys.of("superlink", "superlink"), shown()
    assert shown() == before
    renewed = front.keys.of("superlink", "renewed")
    shutil.copy(renewed.key_file, keys.key_file)
    assert shown() == before  # half a renewal changes nothing
    shutil.copy(renewed.certificate_file, keys.certificate_file)
    assert shown() != before


def test_an_unavailable_superlink_is_503_until_it_is_back(tmp_path: Path) -> None:
    local = LocalKeys.open(tmp_path, "superlink")
    echo = Echo(local)
    port = int(echo.address.rpartition(":")[2])
    front = Front(Keys(tmp_path / "keys"), Fleet(tmp_path / "logs", tmp_path / "pids"), echo.address, local)
    try:
        front.start()
        assert status(front, "site", post(FLEET)) == 200
        echo.close()
        assert [status(front, "site", post(FLEET)) for _ in range(3)] == [503] * 3
        echo = Echo(local, port)
        assert status(front, "site", post(FLEET)) == 200
        assert len(front.events("unreachable")) == 1
        assert len(front.events("connected")) == 2
        stranger = Echo(LocalKeys.open(tmp_path / "stranger", "superlink"))
        front.fleet.stop("gate")
        front.superlink = stranger.address
        front.start()
        assert status(front, "site", post(FLEET)) == 503
        stranger.close()
    finally:
        front.fleet.stop()
        echo.close()


Scenario = Callable[[str], None]


def inside(tmp_path: Path, keys: Keys, echo: Echo, local: LocalKeys, scenario: Scenario) -> str:
    """Run a gate in this process, so that tests can patch its limits; returns its log."""

    host, _, port = echo.address.rpartition(":")
    log, background = Log("gate", tmp_path / "gate.log"), Background()
    found = gate.Gate((host, int(port)), local.certificate, keys.of("superlink", "superlink"), "test", log)
    try:
        scenario(background.serve(found.handle, log))
    finally:
        background.close()
    return (tmp_path / "gate.log").read_text()


def test_slow_callers_are_cut_off(
    tmp_path: Path, front: Front, echo: Echo, local: LocalKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("IDLE", 1.0), ("HEAD", 0.4), ("STALL", 0.4), ("GRACE", 0.6)):
        monkeypatch.setattr(forward, name, value)
    keys = front.keys.of("site", "site")

    def scenario(address: str) -> None:
        with dial(address, keys.authority_file, keys) as sock:
            assert wait_closed(sock, 3)
        with dial(address, keys.authority_file, keys) as sock, pytest.raises(OSError, match=r"."):
            drip(sock, post(FLEET).encode(), 0.05)
        with dial(address, keys.authority_file, keys) as sock:
            sock.sendall(post(FLEET, 1000).replace("\n", "\r\n").encode() + b"half")
            assert wait_closed(sock, 2)
        with dial(address, keys.authority_file, keys) as sock:
            sock.sendall(post(FLEET, 1000).replace("\n", "\r\n").encode())
            with pytest.raises(OSError, match=r"."):
                drip(sock, bytes(60), 0.05)

    inside(tmp_path, front.keys, echo, local, scenario)


def test_a_body_that_is_too_large_is_cut_off(
    tmp_path: Path, front: Front, echo: Echo, local: LocalKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "BODY_BYTES", 1 << 20)
    keys = front.keys.of("site", "site")

    def scenario(address: str) -> None:
        with dial(address, keys.authority_file, keys) as sock:
            sock.sendall(CHUNKED + MEBIBYTE + b"1\r\na\r\n")
            assert answer(sock)[0] == 413

    assert '"body too large"' in inside(tmp_path, front.keys, echo, local, scenario)


def test_connections_per_party_are_limited(
    tmp_path: Path, front: Front, echo: Echo, local: LocalKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CONNECTIONS_OF_ONE", 2)
    keys, server = front.keys.of("site", "site"), front.keys.of("server", "server")

    def scenario(address: str) -> None:
        held = [dial(address, keys.authority_file, keys) for _ in range(2)]
        assert [ask(sock, post(FLEET))[0] for sock in held] == [200, 200]
        with dial(address, keys.authority_file, keys) as sock:
            assert wait_closed(sock, 2)
        with dial(address, server.authority_file, server) as sock:
            assert ask(sock, post(CONTROL))[0] == 200
        for sock in held:
            sock.close()

    assert '"too many connections at once"' in inside(tmp_path, front.keys, echo, local, scenario)


def test_a_revoked_party_is_cut_off_at_its_next_request(front: Front, echo: Echo) -> None:
    authority, gates = front.keys.authority, front.keys.of("superlink", "superlink")
    before = len(echo.seen)
    with front.dial("site", "leaver") as sock:
        assert ask(sock, post(FLEET))[0] == 200
        assert len(authority.revoke("fl-privacy://test/site/leaver")) == 1
        shutil.copy(authority.revoked_file, gates.revoked_file)
        sock.sendall(post(FLEET).replace("\n", "\r\n").encode())
        assert rest(sock) == b""
    with front.dial("site", "leaver") as sock:
        assert wait_closed(sock, 5)
    assert len(echo.seen) == before + 1
    assert status(front, "site", post(FLEET)) == 200
    assert any("site/leaver: revoked" in e["reason"] for e in front.events("refused"))


def test_a_caller_on_an_old_connection_is_asked_to_reconnect(
    tmp_path: Path, front: Front, echo: Echo, local: LocalKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "AGE", 0.0)
    keys = front.keys.of("site", "site")

    def scenario(address: str) -> None:
        with dial(address, keys.authority_file, keys) as sock:
            sock.sendall(post(FLEET).replace("\n", "\r\n").encode())
            said = rest(sock).lower()
            assert said.startswith(b"http/1.1 200")
            assert b"connection: close" in said

    inside(tmp_path, front.keys, echo, local, scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"--superlink": "192.0.2.1:1"}, "must be on loopback"),
        ({"--superlink": "127.0.0.1"}, "must be HOST:PORT"),
        ({"--listen": "127.0.0.1:99999"}, "must be HOST:PORT"),
        ({"--listen": "192.0.2.1:0"}, "choose another --listen"),
        ({"--keys": "/nowhere"}, "certificates"),
        ({"--superlink-ca": "/nowhere"}, "certificates"),
        ({"--federation": "elsewhere"}, "not to the superlink of 'elsewhere'"),
        ({"--nonsense": "x"}, "arguments"),
    ],
)
def test_bad_arguments_are_one_event_and_exit_code_2(
    front: Front,
    changes: dict[str, str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {
        "--listen": "127.0.0.1:0",
        "--superlink": front.superlink,
        "--superlink-ca": str(front.local.certificate),
        "--keys": str(front.keys.of("superlink", "superlink").folder),
        "--federation": "test",
        **changes,
    }
    monkeypatch.setattr(sys, "argv", ["gate", *(text for pair in options.items() for text in pair)])
    assert listener.run("gate", gate.main) == 2
    event = json.loads(capsys.readouterr().err)
    assert event["event"] == "error"
    assert reason in event["reason"]


def test_a_gate_ends_cleanly_on_sigterm(front: Front, tmp_path: Path) -> None:
    other = Front(front.keys, Fleet(tmp_path / "logs", tmp_path / "pids"), front.superlink, front.local)
    other.start()
    child = other.fleet.children["gate"]
    with other.dial("site") as sock:
        assert ask(sock, post(FLEET))[0] == 200
        child.process.terminate()
        assert wait_closed(sock, 5)
    assert child.process.wait(10) == 0
    assert len(other.events("stopped")) == 1
