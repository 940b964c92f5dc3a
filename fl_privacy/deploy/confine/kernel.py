"""Calls to the kernel that Python has no names for."""

from __future__ import annotations

import ctypes
import os
import platform

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 22, 28, 38
# Since 2019, a new call has the same number on every architecture; these are older.
NUMBERS = {
    "x86_64": {"pivot_root": 155, "socket": 41, "sendto": 44, "sendmsg": 46, "sendmmsg": 307,
               "add_key": 248, "request_key": 249, "keyctl": 250},
    "aarch64": {"pivot_root": 41, "socket": 198, "sendto": 206, "sendmsg": 211, "sendmmsg": 269,
                "add_key": 217, "request_key": 218, "keyctl": 219},
}  # fmt: skip
IO_URING_SETUP, OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 425, 428, 429, 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def number(name: str) -> int:
    """The number of a call on this architecture."""
    try:
        return NUMBERS[platform.machine()][name]
    except KeyError:
        raise OSError(f"{platform.machine()}: unknown number of the call {name}") from None


def checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def syscall(call: int, *arguments: object) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return checked(int(libc().syscall(ctypes.c_long(call), *words)))


def prctl(option: int, *values: object) -> None:
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    checked(int(libc().prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words)))))
