"""`fl-privacy preflight KIT` on machines with a wrong clock, port or file: each is named with its fix."""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import format_datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from commands import cli, json_of
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.deploy.preflight import checks, of_kit
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority, load_key
from helpers import Keys
from kits import HERE, change, failures, federation, signed_site


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "ca")


@pytest.fixture
def site(tmp_path: Path, authority: Authority) -> Path:
    return signed_site(tmp_path, authority)


@contextmanager
def gate(keys: Keyring, ahead: dt.timedelta) -> Iterator[str]:
    """A server that answers like a gate, with its own clock."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.certificate_file, keys.key_file)
    context.load_verify_locations(keys.authority_file)
    context.verify_mode = ssl.CERT_REQUIRED
    date = format_datetime(dt.datetime.now(dt.UTC) + ahead, usegmt=True)
    answer = f"HTTP/1.1 403 \r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode()

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as secure:
                    secure.recv(4096)
                    secure.sendall(answer)
            except OSError:
                continue

    with socket.create_server((HERE, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"{HERE}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_wrong_clock_is_named(site: Path) -> None:
    keys = Keyring(site.parent / "superlink" / "keys")
    for ahead, wrong in ((dt.timedelta(), False), (dt.timedelta(hours=3), True), (dt.timedelta(hours=-3), True)):
        with gate(keys, ahead) as address:
            change(site, superlink=address, middleware=[])
            found = failures(site, reach=True)
        assert set(found) == ({"clock"} if wrong else set())
        if wrong:
            side = "behind" if ahead > dt.timedelta() else "ahead of"
            assert found["clock"].startswith(("10800 s", "10799 s", "10801 s", "10802 s", "10798 s"))
            assert side in found["clock"]


def test_clocks_are_compared_even_if_certificates_look_invalid(
    site: Path, tmp_path: Path, authority: Authority
) -> None:
    """On a machine whose clock is years ahead, the gate's certificate looks expired."""
    ring = Keys(tmp_path / "old", "kits")
    ring.authority = authority
    with gate(ring.expired("superlink", "superlink"), dt.timedelta(days=-400)) as address:
        change(site, superlink=address, middleware=[])
        found = failures(site, reach=True)
    assert "expired" in found["peer"]
    assert "ahead of" in found["clock"]


def test_roles_that_only_listen_compare_clocks_too(tmp_path: Path, authority: Authority) -> None:
    keys = authority.issue(Identity("kits", "superlink", "superlink"), tmp_path / "link", [HERE])
    for ahead, wrong in ((dt.timedelta(), False), (dt.timedelta(hours=-3), True)):
        with gate(keys, ahead) as address:
            hosts = {"superlink": address, "shuffler": f"{HERE}:9"}
            out = tmp_path / str(wrong)
            provision(federation(hosts=hosts), out, authority, sign=True, choices=Choices(metrics=None))
            change(out / "shuffler", listen=f"{HERE}:0")
            found = failures(out / "shuffler", reach=True)
        assert set(found) == ({"clock"} if wrong else set())
        assert not wrong or "ahead of the SuperLink's" in found["clock"]


@pytest.mark.parametrize("name", ["superlink", "shuffler", "server", "site-0"])
def test_a_clock_that_is_behind_is_named_without_contacting_anyone(
    site: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = site.parent / name
    if name != "server" and name != "site-0":
        change(kit, listen=f"{HERE}:0")
    assert failures(kit) == {}
    (kit / "logs" / "events.jsonl").touch()
    os.utime(kit / "logs" / "events.jsonl", (time.time() + 7200,) * 2)
    assert failures(kit)["clock"].endswith("s or more behind logs/events.jsonl")
    (kit / "logs" / "events.jsonl").unlink()
    now = time.time()
    monkeypatch.setattr(of_kit.time, "time", lambda: now - 7200)
    assert any(text in failures(kit)["clock"] for text in ("behind the start date of", "behind state/"))


def test_an_unsynchronised_clock_is_a_warning_and_not_a_failure(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, remarks in ((of_kit.TIME_ERROR, 1), (0, 0)):

        class Kernel:
            @staticmethod
            def adjtimex(_: object, answer: int = answer) -> int:
                return answer

        monkeypatch.setattr(of_kit.ctypes, "CDLL", lambda _, kernel=Kernel: kernel)
        found = of_kit._own_clock(Folder.open(site))
        assert [check.ok for check in found] == [True] * remarks


def test_ports_of_ipv4_and_ipv6_are_tried_separately(site: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("IPv6 is not available")
    assert checks.port("[::]:0").ok
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        address = f"[::1]:{taken.getsockname()[1]}"
        change(site.parent / "shuffler", listen=address)
        assert failures(site.parent / "shuffler")["port"] == f"{address}: Address already in use"


def test_a_port_counts_as_the_role_s_own_only_while_the_role_is_served(site: Path) -> None:
    kit = site.parent / "shuffler"
    (kit / "run").mkdir()
    (kit / "run" / "healthy").touch()  # left by a killed process
    with socket.create_server((HERE, 0)) as taken:
        change(kit, listen=f"{HERE}:{taken.getsockname()[1]}")
        assert set(failures(kit)) == {"port"}
        with (kit / "run" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert failures(kit) == {}


def test_an_invalid_proxy_or_key_is_named_instead_of_no_answer(site: Path) -> None:
    change(site, proxy="http://127.0.0.1:99999")
    key = load_key(site / "keys" / "key.pem")
    sealed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (site / "keys" / "key.pem").write_bytes(sealed)
    done = cli("preflight", site, "--json")
    assert (done.returncode, done.stderr) == (2, "")
    found = {check["name"]: check for check in json_of(done)["checks"] if not check["ok"]}
    assert set(found) == {"keys", "peer"}
    assert "key.pem: Password was not given" in found["keys"]["detail"]
    assert "the proxy http://127.0.0.1:99999" in found["peer"]["detail"]
    assert "correct `proxy` in kit.yaml" in found["peer"]["fix"]


def test_an_unexpected_error_is_a_failure_of_its_check(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Folder) -> list[of_kit.Check]:
        raise RuntimeError("no such driver")

    monkeypatch.setattr(of_kit, "_device", broken)
    assert failures(site) == {"check": "device: RuntimeError('no such driver')"}


def test_the_fix_for_a_lost_node_key_is_a_renewal(site: Path) -> None:
    (site / "node" / "node.key").unlink()
    (found,) = [check for check in of_kit.run(Folder.open(site), reach=False) if check.name == "node"]
    assert found.fix == f"fl-privacy pki renew {site}"
    assert cli(*found.fix.split()[1:]).returncode == 0  # the suggested fix works
    assert (site / "node" / "node.key").exists()


def test_rounds_that_a_policy_misses_are_named_and_a_bad_policy_once(site: Path) -> None:
    found = {check.name: check for check in of_kit.run(Folder.open(site), False)}
    assert found["policy"].ok
    assert found["policy"].detail.endswith("rounds of fewer than 3 organisations go without this site (min_cohort)")
    with (site / "policy.yaml").open("a") as policy:
        policy.write("min_cohurt: 2\n")
    assert [name for name, detail in failures(site).items() if "min_cohurt" in detail] == ["policy"]
