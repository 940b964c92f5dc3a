"""Processes that exit are started again, as they were, and not for ever: the same code for kits and local runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fl_privacy.deploy import supervise
from fl_privacy.deploy.commands import Process
from fl_privacy.deploy.processes import Fleet
from fl_privacy.deploy.supervise import OFTEN, Backoff, Supervisor, Watched
from fl_privacy.errors import LaunchError
from fl_privacy.ops.log import Log
from fl_privacy.ops.tail import Tail
from helpers import eventually

SERVE = """
import socket, sys, time
host, port = sys.argv[sys.argv.index("--listen") + 1].split(":")
listener = socket.create_server((host, int(port)))
print('{"time":1,"event":"listening","address":"%s:%d"}' % listener.getsockname(), flush=True)
time.sleep(60)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervise, "FAMILY_EVERY", 0.0)
    fleet = Fleet(tmp_path / "logs", tmp_path / "pids.json")
    yield Supervisor(fleet, Log("test", tmp_path / "events.log"))
    fleet.stop()


def watched(command: list[str], renew: Callable[[], None] = lambda: None, **terms: bool) -> Watched:
    return Watched(Process("one", command, **terms), {}, renew, Backoff(OFTEN))  # type: ignore[arg-type]


def until(supervisor: Supervisor, holds: Callable[[], bool]) -> None:
    def stepped() -> bool:
        supervisor.step()
        return holds()

    eventually(stepped, 20)


def pid_of(supervisor: Supervisor) -> int | None:
    child = supervisor.fleet.children.get("one")
    return child and child.process.pid


def kill(supervisor: Supervisor) -> int:
    pid = supervisor.fleet.children["one"].process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def events(tmp_path: Path) -> list[dict[str, object]]:
    return Tail(tmp_path / "events.log").poll()


def test_a_killed_process_is_started_again_with_the_port_that_it_chose(supervisor: Supervisor, tmp_path: Path) -> None:
    one = watched(python(SERVE, "--listen", "127.0.0.1:0"), announces=True)
    supervisor.start(one)
    supervisor.wait(one)
    before, pid = one.address, kill(supervisor)
    until(supervisor, lambda: one.up and pid_of(supervisor) not in (None, pid))
    assert one.address == before
    assert [event["event"] for event in events(tmp_path)] == ["up", "fell", "up"]
    assert events(tmp_path)[1]["reason"] == "killed by SIGKILL"


def test_a_process_that_keeps_exiting_fails_with_its_reason(supervisor: Supervisor, tmp_path: Path) -> None:
    event = json.dumps({"time": 1, "event": "error", "reason": "no room"})
    one = watched(python(f"import sys; print({event!r}, flush=True); sys.exit(3)"))
    supervisor.start(one)
    with pytest.raises(LaunchError, match=f"one exited {OFTEN} times within 60 s; last reason: no room"):
        until(supervisor, lambda: False)
    assert [event["event"] for event in events(tmp_path)].count("fell") == OFTEN - 1


def test_an_error_that_somebody_must_fix_ends_it_at_once(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(watched(python("import sys; print('bad config'); sys.exit(2)")))
    with pytest.raises(LaunchError, match="one: bad config"):
        until(supervisor, lambda: False)
    assert [event["event"] for event in events(tmp_path)].count("fell") == 0


def test_what_a_killed_process_had_started_ends_before_its_successor_starts(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """Flower's SuperLink starts its executor in a session of its own."""
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    one = watched(python(child + "start_new_session=True); time.sleep(60)"), detaches=True)
    supervisor.start(one)
    parent = psutil.Process(supervisor.fleet.children["one"].process.pid)
    until(supervisor, lambda: bool(parent.children()))
    until(supervisor, lambda: bool(list(supervisor.fleet.children["one"].family())))
    (orphan,) = parent.children()
    pid = kill(supervisor)
    until(supervisor, lambda: pid_of(supervisor) not in (None, pid))
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_what_a_restart_needs_is_renewed_before_it_and_waited_for(supervisor: Supervisor, tmp_path: Path) -> None:
    calls: list[int] = []

    def renew() -> None:
        calls.append(len(supervisor.fleet.children))
        if len(calls) == 1:
            raise LaunchError("superlink: away")

    one = watched(python("import time; time.sleep(60)"), renew)
    supervisor.start(one)
    until(supervisor, lambda: one.up)
    kill(supervisor)
    until(supervisor, lambda: len(calls) == 2 and one.up)
    assert calls == [0, 0]  # nothing ran meanwhile
    assert [event["event"] for event in events(tmp_path)] == ["up", "fell", "waiting", "up"]


def test_pauses_double_and_are_short_again_after_a_steady_minute() -> None:
    backoff, pauses = Backoff(), []
    for _ in range(8):
        assert backoff.exited(now=10.0, born=0.0)
        pauses.append(backoff.pause)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.exited(now=100.0, born=39.0)
    assert backoff.pause == 1


def test_exits_that_are_far_apart_are_never_too_many() -> None:
    backoff = Backoff(OFTEN)
    assert all(backoff.exited(now=20.0 * number, born=20.0 * number - 15) for number in range(1, 50))
    assert not all(backoff.exited(now=1000.0 + number, born=1000.0) for number in range(OFTEN))


def test_ordered_processes_start_one_after_the_other(supervisor: Supervisor) -> None:
    """A kit's relay must be up before what calls it."""
    supervisor.in_order = True
    first = Watched(Process("first", python(SERVE, "--listen", "127.0.0.1:0"), announces=True), {})
    second = Watched(Process("second", python("import time; time.sleep(60)")), {})
    supervisor.watched = [first, second]
    supervisor.step()
    assert list(supervisor.fleet.children) == ["first"]
    until(supervisor, lambda: second.up)
    assert first.up


def test_a_log_that_is_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    """A process that is started again has a new log, which may soon be longer than the old one."""
    log = tmp_path / "log"
    tail = Tail(log)
    log.write_text('{"time":1,"event":"a"}\n')
    assert [event["event"] for event in tail.poll()] == ["a"]
    log.rename(tmp_path / "old")
    log.write_text('{"time":1,"event":"b"}\n{"time":1,"event":"c"}\n')
    assert [event["event"] for event in tail.poll()] == ["b", "c"]
