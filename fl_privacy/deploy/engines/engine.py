"""Running a federation: start it on an engine, follow it to its end, clean up whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_privacy.config import Federation
from fl_privacy.deploy import ledgers
from fl_privacy.deploy.engines import local, simulation
from fl_privacy.deploy.engines.follow import Follower, Result, Submitted
from fl_privacy.deploy.engines.resume import Earlier, Start, check
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.plan import new_run_name
from fl_privacy.deploy.preflight.checks import disk, find_data
from fl_privacy.errors import Interrupted, LaunchError
from fl_privacy.models.initial import check as check_init

ENGINES: dict[str, Callable[[Workspace], Submitted]] = {"local": local.start, "simulation": simulation.start}


def up(
    federation: Federation,
    engine: str,
    runs_dir: Path,
    data_dir: Path | None = None,
    resume: str | Path | None = None,
    watch: Callable[[Path], None] = lambda run_dir: None,
) -> Result:
    """Run a federation to its end, or with `resume` (a name or a path) an earlier run of it.

    `watch` is called several times a second with the run's folder.
    """
    if engine not in ENGINES:
        raise LaunchError(f"engine: {engine!r} is unknown; use {' or '.join(ENGINES)}")
    run = new_run_name(federation)
    if resume is not None:
        run_dir = Earlier.find(resume, runs_dir).run_dir
        check(run_dir, federation)
        runs_dir, run = run_dir.parent, run_dir.name
    _check_here(federation, runs_dir, data_dir)
    if resume is None:
        ledgers.check(federation, ledgers.folder(federation, runs_dir))
    began = time.monotonic()
    workspace = Workspace(federation, run, runs_dir.resolve(), data_dir)
    Start.model_validate({"engine": engine, "data_dir": data_dir and data_dir.resolve()}).write(workspace.home)
    submitted = None
    try:
        submitted = ENGINES[engine](workspace)
        end = Follower(workspace.run_dir, submitted, workspace.supervisor.step, watch, workspace.log).end()
    except KeyboardInterrupt:
        raise Interrupted(workspace.run_dir) from None
    finally:
        if submitted is not None:
            submitted.control.close()
        workspace.clear()
    watch(workspace.run_dir)
    return Result.of(workspace.run_dir, end, time.monotonic() - began, _ledgers(workspace))


def _check_here(federation: Federation, runs_dir: Path, data_dir: Path | None) -> None:
    """What would stop the sites on this machine is found before a process starts and before anybody is charged."""
    room = disk(runs_dir)
    if not room.ok:
        raise LaunchError(f"disk: {room.detail}; {room.fix}")
    check_init(federation)
    federation.route.check_launch(federation)
    find_data(federation, data_dir)
    for name in federation.site_names:
        ledgers.check_unit(federation, name, ledgers.folder(federation, runs_dir) / name)


def _ledgers(workspace: Workspace) -> list[dict[str, Any]]:
    """What every site on this machine has spent, over all runs."""
    states = {name: workspace.sites / name for name in workspace.federation.site_names}
    return ledgers.reports(workspace.federation, states)
