"""Running a federation on any engine, with its progress on a console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fl_privacy.deploy.engines import containers, engine as processes
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.deploy.engines.resume import Earlier, Start
from fl_privacy.deploy.parties import serving
from fl_privacy.errors import LaunchError
from fl_privacy.ops.view import View
from fl_privacy.routes.base import check_engine

if TYPE_CHECKING:
    from rich.console import Console

    from fl_privacy.config import Federation

ENGINES = (*processes.ENGINES, "compose")


def run(
    federation: Federation | None,
    engine: str | None,
    runs_dir: Path,
    data_dir: Path | None,
    resume: str | Path | None,
    console: Console,
) -> Result:
    """Run a federation to its end; whatever happens, all its processes are stopped.

    A resumed run goes by what it was started with, where nothing else is given.
    """
    earlier = Earlier.find(resume, runs_dir) if resume else None
    run_dir, start = (earlier.run_dir, earlier.start) if earlier else (None, Start())
    if federation is None:
        if earlier is None:
            raise LaunchError("config: missing; give the federation's YAML, or the run to resume")
        federation = earlier.federation()
    engine, data_dir = engine or start.engine, data_dir or start.data_dir
    if engine not in ENGINES:
        raise LaunchError(f"engine: {engine!r} is unknown; use {', '.join(ENGINES)}")
    check_engine(federation.route, engine)
    if engine in processes.ENGINES:
        with progress(federation, console) as view:
            return processes.up(federation, engine, runs_dir, data_dir, run_dir, view)
    with console.status("starting the containers"):
        return containers.up(federation, runs_dir, data_dir, _printer(console), run_dir)


def progress(federation: Federation, console: Console) -> View:
    """The live view of a run."""
    first = next((name for _, name in serving(federation, "middleware")), "")
    return View(federation.rounds, federation.cohort, first, console)


def _printer(console: Console) -> Callable[[str], None]:
    """Of what the server's container prints, rounds and errors."""

    def say(line: str) -> None:
        if line.startswith(("round", "error")):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say
