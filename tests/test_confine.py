"""A confined process sees its own folder, Python and the system, but neither the site's files nor its processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fl_privacy.deploy import confine

pytestmark = pytest.mark.skipif(confine.version() == 0, reason="this kernel has no Landlock")


def run(code: str, tmp_path: Path, *, read: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    own = tmp_path / "own"
    own.mkdir(exist_ok=True)
    command = confine.wrapped([sys.executable, "-c", code], read, [own])
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(own)})


def test_it_can_read_and_write_only_its_own_folder(tmp_path: Path) -> None:
    secret = tmp_path / "keys" / "key.pem"
    secret.parent.mkdir()
    secret.write_text("secret")
    code = f"""
import pathlib
own = pathlib.Path({str(tmp_path / "own")!r})
(own / "note").write_text("mine")
assert (own / "note").read_text() == "mine"
secret = pathlib.Path({str(secret)!r})
for attempt in (secret.read_text, lambda: secret.write_text("x"), secret.unlink, lambda: list(secret.parent.iterdir()),
                lambda: (own / "link").symlink_to(secret) or (own / "link").read_text(),
                lambda: (own / "hard").hardlink_to(secret)):
    try:
        attempt()
    except PermissionError:
        continue
    except OSError as error:
        print("other", error)
        continue
    raise SystemExit("it could")
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert secret.read_text() == "secret"


def test_it_cannot_change_read_only_paths(tmp_path: Path) -> None:
    given = tmp_path / "relay.pem"
    given.write_text("certificate")
    code = f"import pathlib; p = pathlib.Path({str(given)!r}); print(p.read_text()); p.write_text('other')"
    done = run(code, tmp_path, read=(given,))
    assert done.stdout.strip() == "certificate"
    assert "PermissionError" in done.stderr
    assert given.read_text() == "certificate"


def test_it_cannot_inspect_a_process_outside(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as outside:
        try:
            done = run(f"open('/proc/{outside.pid}/environ', 'rb').read()", tmp_path)
        finally:
            outside.kill()
    assert "PermissionError" in done.stderr


def test_its_children_are_confined_too_and_can_reach_the_worker(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = tmp_path / "worker"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        code = f"""
import socket, subprocess
assert subprocess.run(["cat", {str(secret)!r}], capture_output=True).returncode != 0
socket.socket(socket.AF_UNIX).connect({str(path)!r})
"""
        done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_flower_s_side_of_a_site_can_be_imported(tmp_path: Path) -> None:
    done = run("import client_app.app, flwr.supernode.cli.flower_supernode", tmp_path)
    assert done.returncode == 0, done.stderr


def test_it_costs_little(tmp_path: Path) -> None:
    before = os.times().children_user
    assert run("pass", tmp_path).returncode == 0
    assert os.times().children_user - before < 1.0
