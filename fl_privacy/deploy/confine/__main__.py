"""`python -m fl_privacy.deploy.confine [OPTIONS] -- COMMAND`: run a command under every measure that there is here."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from fl_privacy.deploy.confine import Means, kernel, landlock, reachable_sockets, seccomp, user, view
from fl_privacy.deploy.confine.landlock import Allowed
from fl_privacy.deploy.forkserver import become

# Of /proc, only what describes the machine: the rest exposes other processes, at least their environment.
PROC = ("cpuinfo", "meminfo", "stat", "uptime", "loadavg", "version", "filesystems", "sys")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/sys", *(f"/proc/{name}" for name in PROC))
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
HERE = Path(__file__).resolve().parents[3]
PACKAGES = ("fl_privacy", "client_app")
NAMES = ("read", "write", "sockets", "bind", "connect")
FAILED = 2  # the exit code for an error that somebody must fix


def main() -> None:
    options = _arguments().parse_args()
    found = confine(options.node, Allowed(**{name: tuple(getattr(options, name)) for name in NAMES}), options.user)
    if options.probe:
        print(json.dumps(asdict(found)))
    elif options.required and found.missing:
        print(f"confinement: required, but code of a run could {'; '.join(found.missing)}", file=sys.stderr)
        sys.exit(FAILED)
    else:
        become(options.command)


def confine(node: Path, given: Allowed, uid: int | None) -> Means:
    """Confine this process to its node folder and what else is given, for good; returns what was possible."""
    parent = os.getppid()
    read = (*map(Path, SYSTEM), *_python(), node, *given.read)
    write = (*map(Path, DEVICES), *given.write)
    sockets = reachable_sockets(given.sockets)
    if uid is not None:
        user.give(node, uid)
    seen = _possible(lambda: view.enter((*read, *given.sockets), write))
    if uid is not None and not user.may_run(_code()):
        uid = None
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    abi = landlock.version()
    if abi:
        landlock.restrict(replace(given, read=read, write=write, list=(HERE,)))
    filtered = _possible(seccomp.install)
    user.become(uid)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)  # a change of user clears it
    if os.getppid() != parent:
        sys.exit("confine: the process that started this one is gone")
    os.umask(0o077)
    os.chdir(node)
    return Means(abi, seen, filtered, uid is not None, sockets)


def _possible(measure: Callable[[], None]) -> bool:
    try:
        measure()
    except OSError:
        return False
    return True


def _python() -> list[Path]:
    """This environment, its base installation, and our packages if they are not installed in it."""
    ours = [HERE / name for name in PACKAGES]
    return [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent, *ours]


def _code() -> list[Path]:
    """Folders that every user of this Python must be able to read."""
    return [Path(sys.executable).parent, Path(sys.executable).resolve().parent, Path(os.__file__).parent, *_python()]


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run a command that can do little")
    parser.add_argument("--node", type=Path, required=True, help="the folder that it may read and starts in")
    parser.add_argument("--read", type=Path, action="append", default=[], help="another path that it may read")
    parser.add_argument("--write", type=Path, action="append", default=[], help="a folder that it may write to")
    parser.add_argument("--sockets", type=Path, action="append", default=[], help="a folder with sockets for it")
    parser.add_argument("--bind", type=int, action="append", default=[], help="a TCP port that it may listen on")
    parser.add_argument("--connect", type=int, action="append", default=[], help="a TCP port that it may connect to")
    parser.add_argument("--user", type=int, help="the number of a user for it, who gets the folder")
    parser.add_argument("--required", action="store_true", help="do not start it where a measure is missing")
    parser.add_argument("--probe", action="store_true", help="print the measures that hold here instead")
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    main()
