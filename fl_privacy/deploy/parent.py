"""Processes that end with the one that started them. On Linux the kernel sees to it; other systems cannot."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{{sys.argv[2]}}: {{error.strerror}}")
"""


def die_with_parent() -> None:
    """Have the kernel end this process if its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command, started by way of one that does the same in its own process.

    Python code between fork and exec may crash or hang where threads run, such as those of gRPC.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *command]
