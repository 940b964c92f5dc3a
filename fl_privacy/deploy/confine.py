"""`python -m fl_privacy.deploy.confine --write DIR... --read DIR... -- COMMAND`: run a command that sees few files.

SuperNodes execute code that comes with a run. Landlock (Linux 5.13) limits such a process and all its children to this
Python, the system's libraries and the named folders, and hides all other processes from it: a site's keys, data and
ledger are out of its reach although they belong to the same user. This needs no privileges. Connecting to sockets
stays possible, and the worker's socket is all that the ClientApp needs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38
# Rights by the Landlock version that introduced them: 13 in the first, then refer, truncate, ioctl on devices.
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
# Of /proc, only what describes the machine: the rest exposes other processes, at least their environment.
PROC = ("cpuinfo", "meminfo", "stat", "uptime", "loadavg", "version", "filesystems", "sys")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/sys", *(f"/proc/{name}" for name in PROC))
PACKAGES = ("fl_privacy", "client_app")
HERE = Path(__file__).resolve().parents[2]
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm", "/dev/tty")


class _Ruleset(ctypes.Structure):
    _fields_ = (("access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """This kernel's Landlock version; 0 if it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(CREATE_RULESET, None, 0, VERSION_FLAG)))


def confine(read: Iterable[Path], write: Iterable[Path]) -> None:
    """From now on, this process and its children see only these paths."""
    libc, abi = _libc(), version()
    if abi == 0:
        raise OSError("this kernel has no Landlock")
    rights = sum(right for since, right in FILE_RIGHTS.items() if abi >= since)
    attributes = _Ruleset(rights)
    ruleset = _checked(libc.syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0))
    try:
        for path in read:
            _allow(libc, ruleset, path, READ & rights)
        for path in write:
            _allow(libc, ruleset, path, rights & ~IOCTL)
        _allow(libc, ruleset, HERE, READ_DIR)  # to find our packages; other files in it stay unreadable
        _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def wrapped(command: list[str], read: Iterable[Path], write: Iterable[Path]) -> list[str]:
    """The command, confined if this kernel supports it."""
    if version() == 0:
        return command
    options = [f"--read={path}" for path in read] + [f"--write={path}" for path in write]
    return [sys.executable, "-m", "fl_privacy.deploy.confine", *options, "--", *command]


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no permission
    try:
        if not path.is_dir():
            rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
        rule = _Beneath(rights, handle)
        _checked(libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(handle)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _python() -> list[Path]:
    """This environment, its base installation, and our packages if they are not installed in it."""
    ours = [HERE / name for name in PACKAGES]
    return [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent, *ours]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command that sees few files")
    parser.add_argument("--read", type=Path, action="append", default=[])
    parser.add_argument("--write", type=Path, action="append", default=[])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    confine([*map(Path, SYSTEM), *_python(), *options.read], [*map(Path, DEVICES), *options.write])
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    sys.exit(main())
