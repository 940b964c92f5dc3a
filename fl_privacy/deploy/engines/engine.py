"""Running a federation: start it on an engine, follow it to its end, clean up whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_privacy.config import Federation
from fl_privacy.deploy import ledgers
from fl_privacy.deploy.engines import local, simulation
from fl_privacy.deploy.engines.follow import Result, follow
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.plan import new_run_name
from fl_privacy.deploy.preflight.checks import disk
from fl_privacy.errors import LaunchError

ENGINES: dict[str, Callable[[Workspace], tuple[Any, int]]] = {"local": local.start, "simulation": simulation.start}


def up(
    federation: Federation,
    engine: str,
    runs_dir: Path,
    data_dir: Path | None = None,
    resume: str | None = None,
    watch: Callable[[Path], None] = lambda run_dir: None,
) -> Result:
    """Run a federation to its end. `watch` is called several times a second with the run's folder."""
    if engine not in ENGINES:
        raise LaunchError(f"engine: {engine!r} is unknown; use {' or '.join(ENGINES)}")
    if resume is not None and not (runs_dir / resume / "checkpoints").is_dir():
        raise LaunchError(f"resume: {runs_dir / resume} has no checkpoint; start a new run")
    room = disk(runs_dir)
    if not room.ok:
        raise LaunchError(f"disk: {room.detail}; {room.fix}")
    if resume is None:
        ledgers.check(federation, ledgers.folder(federation, runs_dir))
    began = time.monotonic()
    workspace = Workspace(federation, resume or new_run_name(federation), runs_dir.resolve(), data_dir)
    control = None
    try:
        control, flower_run = ENGINES[engine](workspace)
        end = follow(workspace.run_dir, control, flower_run, workspace.fleet.check, watch)
    finally:
        if control is not None:
            control.close()
        workspace.clear()
    watch(workspace.run_dir)
    return Result.of(workspace.run_dir, end, time.monotonic() - began, _ledgers(workspace))


def _ledgers(workspace: Workspace) -> list[dict[str, Any]]:
    """What every site on this machine has spent, over all runs."""
    federation, folder = workspace.federation, workspace.sites
    return [found for name in federation.site_names if (found := ledgers.report(federation, name, folder / name))]
