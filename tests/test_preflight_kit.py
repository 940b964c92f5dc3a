"""`fl-privacy preflight KIT` on clocks, ports and files that a machine may have wrong: each is named with its fix."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import format_datetime
from pathlib import Path

import pytest

from fl_privacy.launch.pki import Authority
from fl_privacy.launch.provision import Choices, provision
from fl_privacy.wire.identity import Identity, Keyring
from helpers import Keys
from kits import HERE, change, failures, federation


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "ca")


@pytest.fixture
def site(tmp_path: Path, authority: Authority) -> Path:
    provision(federation(), tmp_path / "kits", authority, sign=True, choices=Choices(metrics=None))
    return tmp_path / "kits" / "site-0"


@contextmanager
def gate(keys: Keyring, ahead: dt.timedelta) -> Iterator[str]:
    """What answers as a gate does, with a clock of its own."""
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


def test_a_clock_that_is_wrong(site: Path, tmp_path: Path, authority: Authority) -> None:
    keys = authority.issue(Identity("kits", "superlink", "superlink"), tmp_path / "link", [HERE])
    for ahead, wrong in ((dt.timedelta(), False), (dt.timedelta(hours=3), True), (dt.timedelta(hours=-3), True)):
        with gate(keys, ahead) as address:
            change(site, superlink=address, middleware=[])
            found = failures(site, reach=True)
        assert set(found) == ({"clock"} if wrong else set())
        if wrong:
            side = "behind" if ahead > dt.timedelta() else "ahead of"
            assert found["clock"].startswith(("10800 s", "10799 s", "10801 s", "10802 s", "10798 s"))
            assert side in found["clock"]


def test_a_clock_is_compared_even_where_it_makes_certificates_look_bad(
    site: Path, tmp_path: Path, authority: Authority
) -> None:
    """To a machine whose clock is years ahead, the gate's certificate has expired."""
    ring = Keys(tmp_path / "old", "kits")
    ring.authority = authority
    with gate(ring.expired("superlink", "superlink"), dt.timedelta(days=-400)) as address:
        change(site, superlink=address, middleware=[])
        found = failures(site, reach=True)
    assert "expired" in found["peer"]
    assert "ahead of" in found["clock"]
