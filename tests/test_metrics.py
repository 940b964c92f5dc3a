"""The metrics: few labels, none chosen by a peer, and a server that cannot be blocked."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from fl_privacy.errors import LaunchError
from fl_privacy.ops import scrape
from observed import get, values


@given(st.text(), st.sampled_from(["", "dtype: ", "site ", "\0"]))
def test_no_text_from_a_peer_becomes_a_label(text: str, before: str) -> None:
    assert scrape.field_of(before + text) in scrape.FIELDS | {scrape.OTHER}


def test_refusals_create_only_a_few_labels() -> None:
    counted = scrape.Prometheus("shuffler", "shuffler")
    for n in range(2000):
        counted.reject(f"CODE_{n}", f"word{n}: x")
        counted.reject("NOT_FOUND", f'run "{n}"\n: x')
    found = [name for name in values(counted.text().decode()) if "rejects" in name]
    other = scrape.OTHER
    wanted = [(other, other), ("NOT_FOUND", "run")]
    assert sorted(found) == sorted(
        f'fl_privacy_rejects_total{{code="{code}",field="{field}"}}' for code, field in wanted
    )


def test_only_get_metrics_is_served_and_only_on_loopback_by_default() -> None:
    _, address = scrape.listen("shuffler", "shuffler", "0")
    assert address.startswith("127.0.0.1:")
    assert get(address)[0] == 200
    assert 'fl_privacy_rounds_total{outcome="released"} 0.0' in get(address)[1]
    assert "python_info" not in get(address)[1]
    assert "process_" not in get(address)[1]
    assert [get(address, path)[0] for path in ("/", "/metrics/x", "/favicon.ico")] == [404] * 3
    assert [get(address, method=method)[0] for method in ("POST", "PUT", "DELETE", "HEAD")] == [501] * 4


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:99999", "203.0.113.7:0", "127.0.0.1:-1"])
def test_an_invalid_address_is_named(address: str) -> None:
    with pytest.raises(LaunchError, match=f"metrics {address}: .*; (choose|use) "):
        scrape.listen("shuffler", "shuffler", address)


def test_hanging_scrapers_are_limited_and_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "PATIENCE", 1.0)
    _, address = scrape.listen("shuffler", "shuffler", "127.0.0.1:0")
    where = ("127.0.0.1", int(address.rpartition(":")[2]))
    hanging = [socket.create_connection(where) for _ in range(scrape.SLOTS + 2)]
    try:
        for connection in hanging:
            connection.sendall(b"GET /metrics HTT")
        for connection in hanging:
            connection.settimeout(10)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert get(address)[0] == 200
    finally:
        for connection in hanging:
            connection.close()


def test_a_role_without_metrics_does_not_load_them() -> None:
    code = "import sys, shuffler_app.__main__, aggregator_app.__main__, fl_privacy.cli\n"
    code += (
        "sys.exit(any(name in sys.modules for name in ('prometheus_client', 'http.server', 'fl_privacy.ops.scrape')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
