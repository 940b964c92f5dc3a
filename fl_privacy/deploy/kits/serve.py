"""`fl-privacy serve KIT`: run one role on its machine, and restart its processes when they exit."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fl_privacy.deploy import flower
from fl_privacy.deploy.commands import LOOPBACK, Ports, processes, variables
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.members import Members
from fl_privacy.deploy.preflight.of_kit import data
from fl_privacy.deploy.processes import Fleet
from fl_privacy.deploy.supervise import Supervisor, Watched, reachable
from fl_privacy.errors import LaunchError
from fl_privacy.files import locked
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import belong_together
from fl_privacy.identity.pki import load_certificate, load_key
from fl_privacy.identity.tls import LocalKeys
from fl_privacy.ops.log import Log

POLL = 0.2
LOOK = 0.5  # seconds: checking whether a kit is served takes its lock for a moment
HEALTH_EVERY = 2.0


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


def supervisor(folder: Folder, fleet: Fleet, log: Log, ports: Ports) -> Supervisor:
    """Of all processes of the role; those of an idle role are none."""
    own = [] if folder.idle else processes(folder.place, ports)
    watched = [Watched(process, variables(folder.place, process)) for process in own]
    return Supervisor(fleet, log, watched, in_order=True)


def healthy(folder: Folder, supervisor: Supervisor) -> bool:
    """All processes are up, and the role accepts connections where it listens."""
    if not supervisor.all_up:
        return False
    place = folder.place
    if place.role.has_node:
        return is_socket(place.socket)
    return place.listen is None or folder.idle or reachable(place.listen)


def check_own(folder: Folder) -> None:
    """Check that key and certificate exist, belong together and are this kit's, in the roster, and that data are there.

    Otherwise peers would only see a timeout. A site's own files are read by its worker, with the task's code: its other
    processes start once that has worked.
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
    if not folder.idle:
        keys.refuse_unlisted(load_certificate(keys.certificate_file))
    by_worker = folder.role.has_node and folder.federation.task.by_site
    for missing in (check for check in (() if by_worker else data(folder)) if not check.ok):
        raise LaunchError(missing.problem)


def serve(folder: Folder, until: Path | None = None) -> None:
    """Run the role until SIGTERM, or until the file `until` exists."""
    check_own(folder)
    with alone(folder):
        prepare(folder)
        log = Log(folder.kit.name, events=folder.logs / "events.jsonl")
        stopping = _stop_on_signals()
        fleet = Fleet(folder.logs, folder.run / "pids.json")
        ports = Ports.free()
        watching = supervisor(folder, fleet, log, ports)
        log("standby" if folder.idle else "starting", route=folder.federation.route.kind)
        beat, members = 0.0, _members(folder, ports, log)
        try:
            while not stopping() and not (until and until.exists()):
                watching.step()
                if members is not None and watching.all_up:
                    members.keep()
                if time.monotonic() - beat > HEALTH_EVERY:
                    fleet.trim()
                    if healthy(folder, watching):
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
