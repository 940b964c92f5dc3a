"""Files appear whole or not at all, locks end with their holder, and addresses read back as written."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fl_privacy import addresses, files
from fl_privacy.errors import LaunchError

HOSTS = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True) | st.ip_addresses().map(str)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("unique", [True, False])
def test_an_unfinished_write_leaves_only_the_old_file(tmp_path: Path, durable: bool, unique: bool) -> None:
    path = tmp_path / "file"
    files.replace(path, b"old", durable=durable, unique=unique)
    file = files.replacing(path, durable=durable, unique=unique)
    file.__enter__().write(b"new")
    assert not file.__exit__(OSError, OSError("broke off"), None)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_its_mode_before_its_name(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "file", mode=0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    def write(text: bytes) -> None:
        for _ in range(50):
            files.replace(tmp_path / "file", text * 1000, durable=False, unique=True)

    threads = [threading.Thread(target=write, args=(text,)) for text in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set((tmp_path / "file").read_bytes())) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_lock_can_be_checked_and_waited_for_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not files.is_locked(path)
    code = f"from fl_privacy import files; files.lock(__import__('pathlib').Path({str(path)!r})); print(1, flush=True)"
    holder = subprocess.Popen([sys.executable, "-c", code + "; input()"], stdin=-1, stdout=-1)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        assert files.is_locked(path)
        with pytest.raises(BlockingIOError), files.locked(path, wait=0.2):
            pass
    finally:
        holder.kill()
        holder.wait()
    with files.locked(path, wait=0.0):
        assert files.is_locked(path)
    assert not files.is_locked(path)


@given(HOSTS, st.integers(0, 65535))
def test_an_address_reads_back_as_written(host: str, port: int) -> None:
    text = addresses.show(host, port)
    assert addresses.parse(text) == (host, port)
    assert (addresses.host_of(text), addresses.port_of(text)) == (host, port)


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", ":1", "host:65536", "host:1x", "::1:80", "[host]:1", "a b:1"]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="must be HOST:PORT"):
        addresses.parse(text)


@given(st.ip_addresses())
def test_loopback_is_distinguished_from_other_addresses(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    assert addresses.is_loopback(str(address)) == address.is_loopback
    assert addresses.is_loopback("localhost")
