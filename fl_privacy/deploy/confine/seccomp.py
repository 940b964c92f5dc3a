"""A seccomp filter for what Landlock's port rules do not see: every connection is TCP, made by `connect`.

Landlock restricts TCP alone: UDP, Multipath TCP and raw sockets have no ports for it, `sendto` with MSG_FASTOPEN
connects without asking it, and io_uring makes sockets that no filter sees. Kernel keyrings, which hold credentials as
agents do, are refused too.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Iterator

from fl_privacy.deploy.confine import kernel

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
X32 = 0x40000000  # calls of x86_64's other ABI have this bit
SECCOMP_MODE_FILTER = 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument has 8 bytes, low word first
LOAD, MASK, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06  # BPF operations
TYPE_MASK = 0xF  # of a socket's type; the rest are flags
MSG_FASTOPEN = 0x20000000
FLAGS = {"sendto": 3, "sendmsg": 2, "sendmmsg": 3}  # which argument holds the flags
REFUSED = ("add_key", "request_key", "keyctl")

Step = tuple[int, int, str, str]  # operation, operand, where to go if it holds and if it does not; "" is the next step


def install() -> None:
    """From now on, for this process and its children. It must have no_new_privs."""
    code = program(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    given = Program(len(code) // 8, ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given))


def program(machine: str) -> bytes:
    """The filter in BPF. OSError on an architecture whose call numbers we do not know."""
    if machine not in ARCHITECTURES:
        raise OSError(f"{machine}: no filter for this architecture")
    steps = list(_steps(ARCHITECTURES[machine], kernel.NUMBERS[machine]))
    ends = {"allow": len(steps) - 2, "refuse": len(steps) - 1}
    code = b""
    for at, (operation, operand, yes, no) in enumerate(steps):
        jumps = [ends[target] - at - 1 if target in ends else int(target or 0) for target in (yes, no)]
        code += struct.pack("=HBBI", operation, *jumps, operand)
    return code


def _steps(architecture: int, calls: dict[str, int]) -> Iterator[Step]:
    yield LOAD, ARCHITECTURE, "", ""
    yield EQUAL, architecture, "", "refuse"
    yield LOAD, NUMBER, "", ""
    yield AT_LEAST, X32, "refuse", ""
    for call in (kernel.IO_URING_SETUP, *(calls[name] for name in REFUSED)):
        yield EQUAL, call, "refuse", ""
    for name, flags in FLAGS.items():
        yield EQUAL, calls[name], "", "2"
        yield LOAD, ARGUMENTS + 8 * flags, "", ""
        yield ANY_BIT, MSG_FASTOPEN, "refuse", "allow"
    yield EQUAL, calls["socket"], "", "allow"
    yield LOAD, ARGUMENTS, "", ""
    yield EQUAL, socket.AF_UNIX, "2", ""
    yield EQUAL, socket.AF_INET, "1", ""
    yield EQUAL, socket.AF_INET6, "", "refuse"
    yield LOAD, ARGUMENTS + 8, "", ""
    yield MASK, TYPE_MASK, "", ""
    yield EQUAL, socket.SOCK_STREAM, "", "refuse"
    yield LOAD, ARGUMENTS + 16, "", ""
    yield EQUAL, 0, "allow", ""
    yield EQUAL, socket.IPPROTO_TCP, "allow", "refuse"
    yield RETURN, ALLOW, "", ""
    yield RETURN, REFUSE, "", ""
