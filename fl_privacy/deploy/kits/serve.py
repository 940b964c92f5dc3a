"""`fl-privacy serve KIT`: run one role on its machine, and restart its processes when they exit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fl_privacy.addresses import parse
from fl_privacy.deploy import flower
from fl_privacy.deploy.commands import LOOPBACK, START, Ports, Process, environment, processes
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.members import Members
from fl_privacy.deploy.preflight.of_kit import data
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import LaunchError
from fl_privacy.files import locked
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import belong_together
from fl_privacy.identity.pki import load_key
from fl_privacy.identity.tls import LocalKeys
from fl_privacy.ops.log import Log
from fl_privacy.ops.tail import Tail

POLL = 0.2
LOOK = 0.5  # seconds: checking whether a kit is served takes its lock for a moment
HEALTH_EVERY = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
STEADY = 60.0  # seconds of running after which the pause before a restart is short again
FATAL = 2  # exit code of our processes for an error that somebody must fix


@contextmanager
def alone(folder: Folder) -> Iterator[None]:
    """Allow one serving process per kit; the lock ends with the process."""
    folder.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder.run / "lock", wait=LOOK))
        except BlockingIOError:
            raise LaunchError(f"kit {folder.path}: is already served; stop that process first") from None
        yield


@dataclass
class Watched:
    """A process of the role, and its recent history."""

    process: Process
    born: float = 0.0
    pause: float = FIRST_PAUSE
    due: float | None = None
    up: bool = False
    tail: Tail | None = None


@dataclass
class Supervisor:
    """Starts the processes in order, each once the one before it is up; only a process that exited is restarted."""

    folder: Folder
    fleet: Fleet
    log: Log
    watched: list[Watched] = field(default_factory=list)

    def step(self) -> None:
        for one in self.watched:
            self._step(one)
            if not one.up:
                return  # the next ones need it

    def _step(self, one: Watched) -> None:
        now = time.monotonic()
        child = self.fleet.children.get(one.process.name)
        if child is None:
            if one.due is None or now >= one.due:
                self._start(one, now)
            return
        if child.process.poll() is not None:
            self._fallen(one, now)
        elif not one.up:
            one.up = self._answers(one)
            if one.up:
                self.log("up", process=one.process.name)
            elif now - one.born > START:
                raise LaunchError(f"{one.process.name} not up within {START:g} s: {child.tail()} (log: {child.log})")

    def _start(self, one: Watched, now: float) -> None:
        process = one.process
        env = {**environment(self.folder.place), **process.env}
        child = self.fleet.start(process.name, process.command, env, process.confined)
        one.born, one.due, one.up, one.tail = now, None, False, Tail(child.log)

    def _fallen(self, one: Watched, now: float) -> None:
        child = self.fleet.children[one.process.name]
        code, why = child.process.returncode, child.tail()
        self.fleet.stop(one.process.name)
        if code == FATAL:
            raise LaunchError(f"{one.process.name}: {why}")
        one.pause = FIRST_PAUSE if now - one.born > STEADY else min(2 * one.pause, LONGEST_PAUSE)
        one.up, one.due = False, now + one.pause
        self.log("fell", process=one.process.name, code=code, reason=why[:500], again_in=one.pause)

    def _answers(self, one: Watched) -> bool:
        if one.process.announces:
            assert one.tail is not None
            return any(event["event"] == "listening" for event in one.tail.poll())
        return one.process.port is None or reachable(one.process.port)

    @property
    def healthy(self) -> bool:
        """All processes are up, and the role accepts connections where it listens."""
        if not all(one.up for one in self.watched):
            return False
        place = self.folder.place
        if place.role.has_node:
            return is_socket(place.socket)
        return place.listen is None or self.folder.idle or reachable(place.listen)


def check_own(folder: Folder) -> None:
    """Check that key and certificate exist, belong together and are this kit's, and that its data are there.

    Otherwise peers would only see a timeout.
    """
    keys, where = folder.keys, f"kit {folder.path}"
    if not keys.certificate_file.exists():
        fix = f"run fl-privacy pki request {folder.path} and install the answer"
        raise LaunchError(f"{where}: has no certificate; {fix}")
    load_key(keys.key_file)
    if not belong_together(*keys.read()):
        raise LaunchError(f"{where}: key.pem, cert.pem, ca.pem do not belong together; install the signed file again")
    if (found := tls.own_identity(keys)) != folder.identity:
        raise LaunchError(f"{where}: its certificate belongs to {found.uri}; install the one signed for this kit")
    for missing in (check for check in data(folder) if not check.ok):
        raise LaunchError(f"data: {missing.detail} (fix: {missing.fix})")


def serve(folder: Folder, until: Path | None = None) -> None:
    """Run the role until SIGTERM, or until the file `until` exists."""
    check_own(folder)
    with alone(folder):
        prepare(folder)
        log = Log(folder.kit.name, events=folder.logs / "events.jsonl")
        stopping = _stop_on_signals()
        fleet = Fleet(folder.logs, folder.run / "pids.json")
        ports = Ports.free()
        watched = [] if folder.idle else [Watched(p) for p in processes(folder.place, ports)]
        supervisor = Supervisor(folder, fleet, log, watched)
        log("standby" if folder.idle else "starting", route=folder.federation.route.kind)
        beat, members = 0.0, _members(folder, ports, log)
        try:
            while not stopping() and not (until and until.exists()):
                supervisor.step()
                if members is not None and all(one.up for one in watched):
                    members.keep()
                if time.monotonic() - beat > HEALTH_EVERY:
                    fleet.trim()
                    if supervisor.healthy:
                        (folder.run / "healthy").touch()
                        beat = time.monotonic()
                time.sleep(POLL)
        finally:
            (folder.run / "healthy").unlink(missing_ok=True)
            # SuperNodes and executors sign off while the SuperLink still runs.
            fleet.stop("supernode", "superexec")
            fleet.stop()
            log("stopped")


def _members(folder: Folder, ports: Ports, log: Log) -> Members | None:
    if not folder.role.has_gate:
        return None
    (folder.path / "nodes").mkdir(exist_ok=True)
    authority = LocalKeys.open(folder.state, "superlink").certificate
    return Members(flower.Control(f"{LOOPBACK}:{ports.superlink}", authority), folder.path / "nodes", log)


def reachable(address: str) -> bool:
    """Whether a process listens there."""
    host, port = parse(address)
    try:
        with socket.create_connection(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port), 1.0):
            return True
    except OSError:
        return False


def is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def prepare(folder: Folder) -> None:
    """The kit's folders, without what a killed predecessor left in `run/`, and the config with the site's own terms."""
    for path in folder.run.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for made in (folder.state, folder.logs):
        made.mkdir(exist_ok=True, mode=0o700)
    os.chmod(folder.run, 0o700)
    folder.place.config.write_text(folder.own_federation.to_yaml())


def _stop_on_signals() -> Callable[[], bool]:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    return lambda: bool(asked)
