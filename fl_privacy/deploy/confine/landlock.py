"""Landlock (Linux 5.13): a process and its children keep only the files, ports and processes that a ruleset names.

It needs no privileges. Every kernel version has its rights; a right is used wherever the kernel has it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fl_privacy.deploy.confine import kernel

VERSION_FLAG = 1
PATH_BENEATH, NET_PORT = 1, 2
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = 1 << 6, 1 << 10, 1 << 11, 1 << 12
TRUNCATE, IOCTL, RESOLVE_UNIX = 1 << 14, 1 << 15, 1 << 16
# In a folder to write to, but for nodes on which a later start could stumble.
WRITE = ~(MAKE_CHAR | MAKE_FIFO | MAKE_BLOCK | MAKE_SYM | IOCTL | RESOLVE_UNIX)
READ = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL | RESOLVE_UNIX
BIND, CONNECT = 1 << 0, 1 << 1
ABSTRACT_SOCKETS, SIGNALS = 1 << 0, 1 << 1
# By the Landlock version that introduced them: 13 rights in the first, then refer, truncate, ioctl on devices, and
# connecting to a Unix socket by its path.
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: IOCTL, 9: RESOLVE_UNIX}
PORT_RIGHTS = {4: BIND | CONNECT}
SCOPES = {6: ABSTRACT_SOCKETS | SIGNALS}


class Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr; an older kernel accepts what it does not know if it is zero."""

    _fields_ = (("files", ctypes.c_uint64), ("ports", ctypes.c_uint64), ("scopes", ctypes.c_uint64))

    @classmethod
    def of(cls, abi: int) -> Ruleset:
        """Everything that a kernel with this version can forbid."""
        return cls(*(sum(right for since, right in table.items() if abi >= since)
                     for table in (FILE_RIGHTS, PORT_RIGHTS, SCOPES)))  # fmt: skip


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Port(ctypes.Structure):
    _fields_ = (("access", ctypes.c_uint64), ("port", ctypes.c_uint64))


@dataclass(frozen=True)
class Allowed:
    """What is left to a confined process."""

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    list: tuple[Path, ...] = ()  # folders whose names it may list, and nothing more
    sockets: tuple[Path, ...] = ()  # folders with Unix sockets that it may connect to
    bind: tuple[int, ...] = ()
    connect: tuple[int, ...] = ()


def version() -> int:
    """This kernel's Landlock version; 0 if it has none."""
    if sys.platform != "linux":
        return 0
    try:
        return kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, None, 0, VERSION_FLAG)
    except OSError:
        return 0


def restrict(allowed: Allowed) -> None:
    """From now on, this process and its children have only what is allowed. It must have no_new_privs."""
    made = Ruleset.of(version())
    ruleset = kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, ctypes.byref(made), ctypes.sizeof(made), 0)
    try:
        for paths, rights in (
            (allowed.read, READ),
            (allowed.write, WRITE),
            (allowed.list, READ_DIR),
            (allowed.sockets, RESOLVE_UNIX),
        ):
            _add_paths(ruleset, paths, rights & int(made.files))
        for ports, right in ((allowed.bind, BIND), (allowed.connect, CONNECT)):
            _add_ports(ruleset, ports, right & int(made.ports))
        kernel.syscall(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_paths(ruleset: int, paths: Iterable[Path], rights: int) -> None:
    for path in paths:
        own = rights if path.is_dir() else rights & OF_A_FILE
        if not own or not path.exists():
            continue  # a missing path needs no permission
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = _Beneath(own, handle)
            kernel.syscall(kernel.LANDLOCK_ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(handle)


def _add_ports(ruleset: int, ports: Iterable[int], right: int) -> None:
    for port in ports if right else ():
        rule = _Port(right, port)
        kernel.syscall(kernel.LANDLOCK_ADD_RULE, ruleset, NET_PORT, ctypes.byref(rule), 0)
