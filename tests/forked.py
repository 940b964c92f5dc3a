"""For tests: `python -m forked WHERE ARGUMENTS`, a command of `fl-privacy` in a fork of a process that has loaded it.

WHERE says in JSON in which folder, on which machine (a network namespace) and with which file for errors; and whether
the processes that the command starts are forks of it too, as those of the engines are.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from fl_privacy.deploy import forkserver
from fl_privacy.deploy.processes import Fleet

NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000
BIND, RECURSIVE, SLAVE, DETACH = 0x1000, 0x4000, 0x80000, 2
HERE = str(Path(__file__).parent)


def main() -> None:
    where, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    os.chdir(where["folder"])
    os.dup2(os.open(where["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.path[:] = [path for path in sys.path if path != HERE]
    for path in reversed([path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]):
        if path not in sys.path:
            sys.path.insert(0, path)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the test runner may ignore it
    if where["machine"]:
        enter(where["machine"])
    if where["forks"]:
        fork_others()
    sys.argv = [where["program"], *arguments]
    from fl_privacy.cli import main

    main()


def enter(namespace: str) -> None:
    """As `ip netns exec` does: the network, and the machine's own files in /etc."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    call("setns", file, NEW_NETWORK)
    os.close(file)
    call("unshare", NEW_MOUNTS)
    call("mount", b"", b"/", b"none", SLAVE | RECURSIVE, None)
    call("umount2", b"/sys", DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)
    for own in Path("/etc/netns", namespace).glob("*"):
        call("mount", str(own).encode(), f"/etc/{own.name}".encode(), b"none", BIND, None)


def fork_others() -> None:
    """Those of an engine and those of a kit; a fork that was killed is started again as a fork."""
    nursery = forkserver.Nursery("fl-privacy")
    forkserver.shared = lambda modules, env: nursery  # type: ignore[assignment]
    make = Fleet.__init__

    def made(fleet: Fleet, *arguments: Any) -> None:
        make(fleet, *arguments)
        fleet.forks = {False: nursery, True: nursery}

    Fleet.__init__ = made  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
