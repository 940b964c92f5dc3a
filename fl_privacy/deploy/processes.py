"""Child processes that never outlive us: own process groups, one log each, recorded pids, an ordered stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from fl_privacy.deploy import environment
from fl_privacy.deploy.forkserver import Forked, ForkServer
from fl_privacy.deploy.parent import dying_with_us
from fl_privacy.errors import LaunchError
from fl_privacy.files import rotate
from fl_privacy.ops.tail import Tail

TERM_GRACE = 8.0
ORPHAN_GRACE = 1.0  # Flower's executors would wait longer for their parents to return
POLL = 0.05
OLD_LOGS = 9
LARGEST_LOG = 10 * 2**20
OWN_LOG = "serve"  # where `site start` sends the output of the serving process


@dataclass
class Child:
    """A running process and its log."""

    name: str
    process: subprocess.Popen[bytes] | Forked
    log: Path
    _family: dict[int, float] = field(default_factory=dict)

    def remember(self, descendant: int, born: float) -> None:
        """Flower's executors leave our process group, and cannot be found once their parents are gone."""
        self._family[descendant] = born

    def family(self) -> Iterator[psutil.Process]:
        """Descendants that are still alive; a reused pid does not count."""
        for pid, born in self._family.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group and every descendant that left it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        for process in self.family():
            with suppress(psutil.Error):
                process.send_signal(number)

    def why(self) -> str:
        """Why an exited process exited."""
        code = self.process.returncode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else self.tail() or f"exit code {code}"

    def tail(self, lines: int = 3) -> str:
        """For an error message: the reason that the process logged, or else the last lines of its log."""
        reasons = [
            e["reason"] for e in Tail(self.log).poll() if e.get("event") in ("error", "failed") and e.get("reason")
        ]
        if reasons:
            return str(reasons[-1])
        text = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " | ".join(line.strip() for line in text[-lines:])


class Fleet:
    """All processes of one federation."""

    def __init__(self, logs: Path, pid_file: Path) -> None:
        self.children: dict[str, Child] = {}
        self.forks: dict[bool, ForkServer] = {}  # for processes that are confined, and for those that are not
        self._logs = logs
        self._pid_file = pid_file
        logs.mkdir(parents=True, exist_ok=True)
        pid_file.parent.mkdir(parents=True, exist_ok=True)

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, confined: bool = False
    ) -> Child:
        """Start a process with `env` added to what it inherits; `confined` ones inherit nothing."""
        log = self.log(name)
        with log.open("ab") as output:
            everything = {**({} if confined else environment.own()), **(env or {})}
            process = self._fork(command, everything, output, confined) or subprocess.Popen(
                dying_with_us(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=everything,
                start_new_session=True,
            )
        self.children[name] = Child(name, process, log)
        pids = {child.name: child.process.pid for child in self.children.values()}
        self._pid_file.write_text(json.dumps(pids))
        return self.children[name]

    def _fork(self, command: Sequence[str], env: Mapping[str, str], output: BinaryIO, confined: bool) -> Forked | None:
        """The process as a fork, if there is a fork server for its kind."""
        if confined not in self.forks or command[0] != sys.executable:
            return None
        with suppress(OSError):
            return self.forks[confined].start(command, env, output)
        return None

    def log(self, name: str) -> Path:
        """A new log file; the last few old ones are kept, and number 1 is the newest."""
        log = self._logs / f"{name}.log"
        if log.exists():
            log.rename(self._first_old(name))
        return log

    def _first_old(self, name: str) -> Path:
        """Make room for the newest old log: the others move on by one, and the oldest is deleted."""
        places = [self._logs / f"{name}.{number}.log" for number in range(1, OLD_LOGS + 1)]
        rotate(places)
        return places[0]

    def trim(self, largest: int = LARGEST_LOG) -> None:
        """Rotate the logs of long-lived processes once they are large; the processes keep writing to the same file."""
        for name in (*self.children, OWN_LOG):
            log = self._logs / f"{name}.log"
            if log.exists() and log.stat().st_size > largest:
                with suppress(OSError):  # a full disk must not stop anybody
                    shutil.copyfile(log, self._first_old(name))
                os.truncate(log, 0)

    def wait_for(self, name: str, event: str, timeout: float) -> dict[str, Any]:
        """The first such event in a process's log; an error if the process ends before it."""
        child, until = self.children[name], time.monotonic() + timeout
        tail = Tail(child.log)
        while True:
            for line in tail.poll():
                if line["event"] == event:
                    return line
            if child.process.poll() is not None:
                raise LaunchError(f"{name} did not start: {child.tail()}")
            if time.monotonic() > until:
                raise LaunchError(f"{name} did not start within {timeout:g} s; see {child.log}")
            time.sleep(POLL)

    def check(self) -> None:
        """Raise if a process has died."""
        for child in self.children.values():
            if child.process.poll() is not None:
                code = child.process.returncode
                raise LaunchError(f"{child.name} ended with {code}: {child.tail()} (log: {child.log})")

    def bury(self, name: str) -> None:
        """End whatever an exited process left running: it is started again, and there must not be two."""
        child = self.children.pop(name)
        child.signal(signal.SIGKILL)
        child.process.wait()

    def remember_families(self) -> None:
        """Remember the descendants of all processes while they can still be found, in one look at this machine."""
        heads = {child.process.pid: child for child in self.children.values()}
        parents, born = dict[int, int](), dict[int, float]()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                parents[process.pid], born[process.pid] = process.ppid(), process.create_time()
        for pid, above in parents.items():
            while above in parents and above not in heads:
                above = parents[above]
            if above in heads:
                heads[above].remember(pid, born[pid])

    def stop(self, *prefixes: str) -> None:
        """Stop processes by the prefix of their names (all without one): SIGTERM first, then SIGKILL."""
        chosen = [c for n, c in self.children.items() if not prefixes or n.startswith(prefixes)]
        self.remember_families()
        for child in chosen:
            child.signal(signal.SIGTERM)
        until = time.monotonic() + TERM_GRACE
        while time.monotonic() < until and any(_alive(child) for child in chosen):
            self.remember_families()
            if all(child.process.poll() is not None for child in chosen):
                until = min(until, time.monotonic() + ORPHAN_GRACE)
            time.sleep(POLL)
        for child in chosen:
            child.signal(signal.SIGKILL)
            child.process.wait()
            del self.children[child.name]
        if not self.children:
            self._pid_file.unlink(missing_ok=True)


def _alive(child: Child) -> bool:
    return child.process.poll() is None or any(True for _ in child.family())
