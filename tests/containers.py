"""Docker for tests that need it. They run only with FL_PRIVACY_CONTAINERS=1: starting an engine takes minutes."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SWITCH = "FL_PRIVACY_CONTAINERS"
LOCKED_DOWN = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


@cache
def engine() -> dict[str, str] | str:
    """The environment that points `docker` at an engine, or the reason why there is none."""
    if os.environ.get(SWITCH) != "1":
        return f"{SWITCH}=1 is not set"
    script = shlex.quote(str(ROOT / "scripts" / "engine.sh"))
    found = subprocess.run(
        ["bash", "-c", f'lines=$({script}) || exit 3; eval "$lines"; env -0'], capture_output=True, text=True
    )
    if found.returncode:
        return found.stderr.strip().splitlines()[-1]
    return dict(line.split("=", 1) for line in found.stdout.split("\0") if line)


def enabled() -> dict[str, str]:
    """The engine's environment; skips the test if there is none."""
    found = engine()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def docker(*arguments: str | Path, check: bool = True, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = ["docker", *map(str, arguments)]
    done = subprocess.run(command, env=enabled(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0 or not check, f"{shlex.join(command)}\n{done.stderr[-3000:]}"
    return done
