"""`fl-privacy site start|stop|status`: a kit served in the background, without systemd or a container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from fl_privacy.config import NoPrivatise
from fl_privacy.errors import ConfigError, LaunchError
from fl_privacy.launch.kit import Folder
from fl_privacy.launch.preflight_kit import run as check
from fl_privacy.launch.processes import Tail

UP = 90.0
DOWN = 40.0
POLL = 0.2
FRESH = 15.0  # seconds that a sign of health counts


def start(folder: Folder) -> dict[str, Any]:
    """Start serving, detached; nothing is left running where it does not come up."""
    _is_site(folder)
    if _pid(folder) is not None:
        raise LaunchError(f"site {folder.kit.name}: runs already (pid {_pid(folder)}); stop it first")
    failed = [found for found in check(folder, reach=False) if not found.ok]
    if failed:
        raise LaunchError("; ".join(f"{found.name}: {found.detail} (fix: {found.fix})" for found in failed))
    folder.logs.mkdir(exist_ok=True, mode=0o700)
    log = folder.logs / "serve.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fl_privacy", "serve", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    folder.run.mkdir(exist_ok=True, mode=0o700)
    _note(folder).write_text(json.dumps({"pid": process.pid, "born": psutil.Process(process.pid).create_time()}))
    try:
        _wait(folder, process, log)
    except BaseException:
        stop(folder)
        raise
    return status(folder)


def _wait(folder: Folder, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it is up."""
    until = time.monotonic() + UP
    while not _healthy(folder):
        if process.poll() is not None:
            raise LaunchError(f"site {folder.kit.name}: did not start: {_last_line(log)}")
        if time.monotonic() > until:
            raise LaunchError(f"site {folder.kit.name}: was not up after {UP:g} s and was stopped; see {folder.logs}")
        time.sleep(POLL)


def stop(folder: Folder) -> dict[str, Any]:
    """End it; its own children end with it."""
    _is_site(folder)
    pid = _pid(folder)
    if pid is not None:
        process = psutil.Process(pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DOWN)
        except psutil.TimeoutExpired:
            os.killpg(pid, signal.SIGKILL)
    _note(folder).unlink(missing_ok=True)
    return {"site": folder.kit.name, "state": "down"}


def status(folder: Folder) -> dict[str, Any]:
    """From what it leaves in its folder; nothing is asked over a socket."""
    _is_site(folder)
    pid = _pid(folder)
    state = "down" if pid is None else "up" if _healthy(folder) else "starting"
    if pid is None and _healthy(folder):
        state = "up"  # served by systemd or in a container
    last = next(reversed(Tail(folder.logs / "worker.log").poll()), None)
    ledger = None
    if not isinstance(folder.federation.privatise, NoPrivatise):
        from fl_privacy.dp.policy import open_ledger

        ledger = open_ledger(folder.own_federation, folder.kit.name, folder.state).report()
    return {
        "site": folder.kit.name,
        "federation": folder.kit.federation,
        "state": state,
        "pid": pid,
        "processes": _processes(folder) if state != "down" else {},
        "last": None if last is None else {k: v for k, v in last.items() if k != "role"},
        "ledger": ledger,
        "logs": str(folder.logs),
    }


def _is_site(folder: Folder) -> None:
    if folder.kit.role != "site":
        raise ConfigError(f"kit {folder.path}: is a {folder.kit.role}'s; use fl-privacy serve, systemd or a container")


def _note(folder: Folder) -> Path:
    return folder.state / "background.json"


def _pid(folder: Folder) -> int | None:
    """Of the serving process, if it is still that one."""
    try:
        note = json.loads(_note(folder).read_text())
        process = psutil.Process(int(note["pid"]))
        alive = process.create_time() == note["born"] and process.status() != psutil.STATUS_ZOMBIE
        return process.pid if alive else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def _healthy(folder: Folder) -> bool:
    try:
        return time.time() - (folder.run / "healthy").stat().st_mtime < FRESH
    except OSError:
        return False


def _processes(folder: Folder) -> dict[str, int]:
    try:
        return dict(json.loads((folder.run / "pids.json").read_text()))
    except (OSError, ValueError):
        return {}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"
