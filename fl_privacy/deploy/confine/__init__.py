"""Confinement of SuperNodes, which execute code that comes with a run.

A confined process and all its children see this Python, the system's libraries and the named folders; they use the
named ports, and reach neither other processes nor other sockets: a site's keys, data, ledger, metrics and worker are
out of their reach although they may belong to the same user. `python -m fl_privacy.deploy.confine` takes every measure
that this machine offers; `Means` says which ones they are, and what is missing without the others.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from fl_privacy.deploy import environment
from fl_privacy.deploy.confine import user
from fl_privacy.deploy.confine.landlock import Allowed
from fl_privacy.errors import LaunchError

COMMAND = (sys.executable, "-m", "fl_privacy.deploy.confine")
TIMEOUT = 30.0
LISTENING = 0x10000  # a flag in /proc/net/unix
PORTS, SIGNALS, SOCKETS = 4, 6, 9  # the Landlock versions that brought them


@dataclass(frozen=True)
class Means:
    """The measures that hold for a confined process here."""

    landlock: int = 0  # its version
    view: bool = False  # a file system of its own
    filter: bool = False  # of the sockets that it may make
    user: bool = False  # of its own
    sockets: tuple[str, ...] = ()  # of other programs, which it could connect to in the absence of any measure

    @property
    def missing(self) -> tuple[str, ...]:
        """What code of a run could do here."""
        found = []
        if not self.landlock:
            found.append("read keys and data (Linux 5.13 with Landlock forbids it)")
        if self.landlock < PORTS or not self.filter:
            found.append("connect to any port (Linux 6.7 with Landlock forbids it)")
        if self.landlock < SIGNALS and not self.user:
            found.append("kill processes of this user (Linux 6.12 with Landlock forbids it)")
        if self.landlock < SOCKETS and not (self.view or self.user) and self.sockets:
            more = f" and {len(self.sockets) - 1} more sockets" if len(self.sockets) > 1 else ""
            found.append(f"connect to {self.sockets[0]}{more} (user namespaces or Linux 7.1 with Landlock forbid it)")
        return tuple(found)

    @property
    def held(self) -> str:
        """The measures in words."""
        words = {"own user": self.user, "own file system": self.view, "socket filter": self.filter}
        return ", ".join([f"Landlock {self.landlock}"] * bool(self.landlock) + [name for name in words if words[name]])


def wrapped(command: list[str], node: Path, allowed: Allowed, required: bool = False) -> list[str]:
    """The command, confined to its node folder and what else is allowed.

    With `required` it does not start where a measure is missing.
    """
    if sys.platform != "linux":
        return command
    return [*COMMAND, *_options(node, allowed), *["--required"] * required, "--", *command]


def probe(node: Path) -> list[str]:
    """The command that confines itself to a folder and prints the measures that hold."""
    return [*COMMAND, "--probe", *_options(node, Allowed()), "--", "nothing"]


def parsed(text: str) -> Means:
    """What `probe` printed; nothing holds if it printed nothing."""
    try:
        found = json.loads(text)
        return Means(**{**found, "sockets": tuple(found["sockets"])})
    except (ValueError, TypeError, KeyError):
        return Means()


@cache
def means() -> Means:
    """What holds on this machine for this user, found by trying."""
    with tempfile.TemporaryDirectory() as scratch:
        node = Path(scratch)
        env = environment.confined(node)
        try:
            done = subprocess.run(probe(node), env=env, capture_output=True, text=True, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired):
            return Means()
    return parsed(done.stdout)


def demand(required: bool) -> None:
    """Raise if a policy requires confinement and some of it is missing here."""
    if required and (missing := means().missing):
        fix = "change the machine, or set `confinement: preferred` in the policy"
        raise LaunchError(f"confinement: required, but code of a run could {'; '.join(missing)}; {fix}")


def _options(node: Path, allowed: Allowed) -> list[str]:
    words = [f"--{name}={value}" for name, values in asdict(allowed).items() for value in values]
    uid = user.of(node)
    return [f"--node={node}", *words] if uid is None else [f"--node={node}", *words, f"--user={uid}"]


def reachable_sockets(own: tuple[Path, ...]) -> tuple[str, ...]:
    """Unix sockets that other programs listen on and that this user may connect to; those in `own` folders are ours."""
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        path = Path(fields[7]) if len(fields) == 8 else Path()
        if path.is_absolute() and int(fields[3], 16) & LISTENING and not any(path.is_relative_to(p) for p in own):
            found |= {str(path)} if _connectable(path) else set()
    return tuple(sorted(found))


def _connectable(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode) and os.access(path, os.W_OK)
    except OSError:
        return False
