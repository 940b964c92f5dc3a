"""A user of its own: a SuperNode that root starts becomes a user that owns its node folder and nothing else."""

from __future__ import annotations

import os
import pwd
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path

from fl_privacy.deploy.confine import kernel

FIRST, COUNT = 60_706, 478  # of users: neither distributions nor systemd give out these numbers
CAP_CHOWN, CAP_SETGID, CAP_SETUID = 0, 6, 7
NO_ROOT, NO_ROOT_LOCKED = 1, 2  # securebits: user 0 is a user like any other
LISTABLE = stat.S_IROTH | stat.S_IXOTH


def of(node: Path) -> int | None:
    """The number of the user for a node folder; None unless we are root and may change users."""
    if os.geteuid() != 0 or not _capable(CAP_CHOWN, CAP_SETGID, CAP_SETUID):
        return None
    start = zlib.crc32(os.fsencode(node.absolute()))
    return next((uid for offset in range(COUNT) if _free(uid := FIRST + (start + offset) % COUNT)), None)


def share(folder: Path, user: int | None) -> None:
    """Let the user reach sockets that are made in a folder from now on: they get the folder's group."""
    if user is not None:
        os.chown(folder, -1, user)
        folder.chmod(0o2710)


def give(folder: Path, user: int) -> None:
    """Make the user the owner of a folder and of everything in it, but not of what links in it lead to."""
    os.chown(folder, user, user)
    for _, folders, files, handle in os.fwalk(folder):
        for name in (*folders, *files):
            os.chown(name, user, user, dir_fd=handle, follow_symlinks=False)


def may_run(paths: Iterable[Path]) -> bool:
    """Whether every user can get to these folders and read them."""
    return all(
        path.stat().st_mode & LISTABLE == LISTABLE
        and all(above.stat().st_mode & stat.S_IXOTH for above in path.parents)
        for path in paths
    )


def become(user: int | None) -> None:
    """Change to the user for good; without one, root stays root in name but loses every capability at the next exec."""
    if os.geteuid() != 0:
        return
    kernel.prctl(kernel.PR_SET_SECUREBITS, NO_ROOT | NO_ROOT_LOCKED)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _capable(*capabilities: int) -> bool:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    held = int(line.split()[1], 16)
    return all(held >> capability & 1 for capability in capabilities)


def _free(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return True
    return False
