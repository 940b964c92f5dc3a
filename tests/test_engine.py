"""scripts/compose-test.sh: CI relies on its exit code, and it always stops the engine it started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from containers import ROOT


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("engine", "wheelhouse", "tests", "code"),
    [(False, 1, 0, 1), (False, 0, 0, 3), (True, 1, 0, 1), (True, 0, 0, 0), (True, 0, 1, 1), (True, 0, 3, 1)],
)
def test_only_a_missing_engine_is_exit_code_3(
    tmp_path: Path, engine: bool, wheelhouse: int, tests: int, code: int
) -> None:
    up = tmp_path / "up"
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "Makefile").write_text(f"wheelhouse:\n\t@exit {wheelhouse}\n")
    program(tmp_path / ".venv" / "bin" / "python", f"exit {tests}")
    docker = program(tmp_path / "bin" / "docker", f"test -e {up}")
    starts = program(tmp_path / "engine", f"case $1 in env) echo :;; up) touch {up};; down) rm {up};; esac")
    path = f"{docker.parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CONTAINER_ENGINE": str(starts) if engine else "/nonexistent"}
    done = subprocess.run(["bash", tmp_path / "scripts" / "compose-test.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == code or (engine and os.geteuid() != 0), done.stderr
    assert not up.exists()
