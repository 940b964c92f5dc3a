"""`fl-privacy site start|stop|status`: serve a kit in the background, without systemd or a container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fl_privacy.deploy import environment, ledgers
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.preflight.of_kit import run as check
from fl_privacy.errors import ConfigError, LaunchError
from fl_privacy.ops.tail import Tail
from fl_privacy.tasks.measures import latest

UP = 90.0
DOWN = 40.0
POLL = 0.2
FRESH = 15.0  # seconds for which a sign of health counts
DECLINED = ("refused", "not-sent", "failed", "error")  # events of a worker that sent nothing, with the reason
ELSEWHERE = "by systemd, a container or fl-privacy serve; stop it there"


def start(folder: Folder) -> dict[str, Any]:
    """Start serving in a detached process; if it does not come up, nothing is left running."""
    _is_site(folder)
    if (pid := _pid(folder)) is not None:
        raise LaunchError(f"site {folder.kit.name}: already running (pid {pid}); stop it first")
    if folder.served:
        raise LaunchError(f"site {folder.kit.name}: already served, {ELSEWHERE}")
    failed = [found for found in check(folder, reach=False) if not found.ok]
    if failed:
        raise LaunchError("; ".join(found.problem for found in failed))
    process = None
    try:
        for made in (folder.logs, folder.run, folder.state):
            made.mkdir(exist_ok=True, mode=0o700)
        log, began = folder.logs / "serve.log", time.time()
        process = _launch(folder, log)
        born = psutil.Process(process.pid).create_time()
        _note(folder).write_text(json.dumps({"kit": str(folder.path), "pid": process.pid, "born": born}))
        _wait(folder, process, log, began)
    except BaseException as error:
        if process is not None:
            _end(process.pid)
        _note(folder).unlink(missing_ok=True)
        if isinstance(error, OSError):
            why = f"{error.filename or folder.path}: {error.strerror or error}"
            raise LaunchError(f"site {folder.kit.name}: did not start: {why}; free some space or fix it") from None
        raise
    return status(folder)


def _launch(folder: Folder, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fl_privacy", "serve", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment.own(),
            start_new_session=True,
        )


def _wait(folder: Folder, process: subprocess.Popen[bytes], log: Path, began: float) -> None:
    """Wait until it is up: this process, not one that was just killed or that systemd started in the meantime."""
    until = time.monotonic() + UP
    while True:
        if process.poll() is not None:
            raise LaunchError(f"site {folder.kit.name}: did not start: {_last_line(log)}")
        if _healthy(folder, began) and _is_parent(process.pid, _processes(folder)):
            return
        if time.monotonic() > until:
            raise LaunchError(f"site {folder.kit.name}: was not up within {UP:g} s and was stopped; see {folder.logs}")
        time.sleep(POLL)


def _is_parent(pid: int, processes: dict[str, int]) -> bool:
    try:
        return bool(processes) and all(psutil.Process(child).ppid() == pid for child in processes.values())
    except psutil.Error:
        return False


def stop(folder: Folder) -> dict[str, Any]:
    """Stop the serving process and its children."""
    _is_site(folder)
    pid = _pid(folder)
    if pid is not None:
        try:
            _end(pid)
        except (psutil.AccessDenied, PermissionError):
            raise LaunchError(f"site {folder.kit.name}: pid {pid} is another user's; stop it as that user") from None
    elif folder.served:
        raise LaunchError(f"site {folder.kit.name}: running, started {ELSEWHERE}")
    _note(folder).unlink(missing_ok=True)
    return {"site": folder.kit.name, "state": "down"}


def _end(pid: int) -> None:
    """SIGTERM first, then SIGKILL."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DOWN)
        except psutil.TimeoutExpired:
            os.killpg(pid, signal.SIGKILL)
            process.wait(DOWN)


def status(folder: Folder) -> dict[str, Any]:
    """From the files in the kit; no process is asked."""
    _is_site(folder)
    pid = _pid(folder)
    served = pid is not None or folder.served  # or started by systemd or in a container
    state = "down" if not served else "up" if _healthy(folder) else "starting"
    worker = Tail(folder.logs / "worker.log").poll()
    last = worker[-1] if worker else None
    return {
        "site": folder.kit.name,
        "federation": folder.kit.federation,
        "state": state,
        "rounds": folder.federation.rounds,
        "pid": pid,
        "processes": _processes(folder) if state != "down" else {},
        "superlink": _superlink(folder) if state != "down" else None,
        "last": None if last is None else {k: v for k, v in last.items() if k != "role"},
        "declined": _declined(folder),
        "metrics": _metrics(worker) if state != "down" else None,
        "own": latest(folder.state / "metrics"),
        "ledger": ledgers.report(folder.own_federation, folder.kit.name, folder.state),
        "logs": str(folder.logs),
    }


def _is_site(folder: Folder) -> None:
    if not folder.role.has_node:
        raise ConfigError(f"kit {folder.path}: belongs to a {folder.kit.role}; use serve, systemd or a container")


def _note(folder: Folder) -> Path:
    return folder.state / "background.json"


def _pid(folder: Folder) -> int | None:
    """Pid of the serving process, if it still runs; in a copy of a kit the note is about the original."""
    try:
        note = json.loads(_note(folder).read_text())
        if note["kit"] != str(folder.path):
            return None
        process = psutil.Process(int(note["pid"]))
        alive = process.create_time() == note["born"] and process.status() != psutil.STATUS_ZOMBIE
        return process.pid if alive else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def _healthy(folder: Folder, since: float = 0.0) -> bool:
    try:
        return (folder.run / "healthy").stat().st_mtime > max(since, time.time() - FRESH)
    except OSError:
        return False


def _processes(folder: Folder) -> dict[str, int]:
    try:
        return dict(json.loads((folder.run / "pids.json").read_text()))
    except (OSError, ValueError):
        return {}


def _superlink(folder: Folder) -> str | None:
    """What the relay logged when its connection to the SuperLink last changed."""
    ways = [event for event in Tail(folder.logs / "relay.log").poll() if event["event"] in ("connected", "unreachable")]
    if not ways:
        return None
    return "connected" if ways[-1]["event"] == "connected" else f"unreachable: {ways[-1].get('reason', '')}"


def _declined(folder: Folder) -> dict[str, Any] | None:
    """Why the site sent nothing, unless it has sent something since."""
    found = None
    for event in Tail(folder.logs / "events.jsonl").poll():
        if event["event"] == "uploaded":
            found = None
        elif event["event"] in DECLINED and event.get("reason"):
            found = {key: event.get(key) for key in ("time", "run", "round", "reason")}
    return found


def _metrics(events: list[dict[str, Any]]) -> str | None:
    """Where the worker serves its metrics, or why it does not."""
    told = [event for event in events if event["event"] in ("metrics", "metrics-failing")]
    if not told:
        return None
    return str(told[-1].get("address") or f"none: {str(told[-1].get('reason')).removeprefix('metrics ')}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "no output"
