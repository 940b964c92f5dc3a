"""Federations from Python and notebooks: `fl_privacy.up(...)` runs one, and a `Run` has what came out of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.config import Federation
from fl_privacy.config.changes import config_of
from fl_privacy.errors import Interrupted, LaunchError
from fl_privacy.export import source
from fl_privacy.ops import runs as folders
from fl_privacy.ops.status import read as read_status, resume_words
from fl_privacy.round.best import measured
from fl_privacy.transcript import open_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from torch import nn

PathLike = str | Path
DATA = "FL_PRIVACY_DATA"


class Run:
    """One run, by its name in `runs_dir` or by its folder; what it holds is read when it is asked for."""

    def __init__(self, run: PathLike, runs_dir: PathLike = folders.RUNS) -> None:
        self.path = folders.find(run, Path(runs_dir)).resolve()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """running, completed, failed or interrupted."""
        return read_status(self.path).state

    @property
    def manifest(self) -> dict[str, Any]:
        return open_run(self.path).manifest

    @cached_property
    def federation(self) -> Federation:
        """The federation as the run knew it."""
        return config_of(self.manifest, str(self.path))

    @property
    def metrics(self) -> Any:
        """One row per round: a DataFrame where pandas is installed, or a list of dicts."""
        return _table(open_run(self.path).metrics)

    @property
    def ledgers(self) -> Any:
        """What each site on this machine has spent, over all its runs; a table as `metrics`."""
        from fl_privacy.deploy import ledgers

        sites = ledgers.folder(self.federation, self.path.parent)
        return _table(ledgers.reports(self.federation, {name: sites / name for name in self.federation.site_names}))

    def model(self, round: int | str = source.LAST) -> nn.Module:
        """The torch module with the weights after a round: `last`, `best` or a number."""
        from fl_privacy.export.write import module

        return module(source.of_run(self.path, str(round)))

    def export(self, to: PathLike, round: int | str = source.LAST, shape: Sequence[int] | None = None) -> Path:
        """Write the model as .safetensors, .pt or .onnx, and a card beside it; returns the card's file.

        ONNX needs the shape of one record, if the task does not state it.
        """
        from fl_privacy.export.write import write

        return write(source.of_run(self.path, str(round)), Path(to), tuple(shape) if shape else None)[0]

    def attack(
        self, *names: str, observers: Sequence[str] = (), data_dir: PathLike | None = None, seeds: int = 3
    ) -> dict[str, Any]:
        """Replay attacks on the run, by default all that can read its views; the scores are also kept in its folder."""
        from attacks.common.replay import keep, replay

        found = replay(self.path, names, _data(data_dir), seeds, observers=observers)
        keep(self.path, found)
        return found

    def plot(self, *metrics: str) -> Figure:
        """A figure of the metrics by round, by default of all that were measured."""
        from fl_privacy.report.figures import Curve, side_by_side

        rows = [row for row in open_run(self.path).metrics if isinstance(row.get("round"), int)]
        found = {row["round"]: measured(row) for row in rows}
        curves = []
        for name in metrics or dict.fromkeys(name for row in found.values() for name in row):
            points = {round: row[name] for round, row in found.items() if name in row}
            curves.append(Curve(name, list(points), list(points.values())))
        return side_by_side(self.name, "round", curves)

    def __repr__(self) -> str:
        found = read_status(self.path)
        score = "".join(f", {name} {value:.4f}" for name, value in found.score.items())
        return f"<Run {self.name}: {found.state}, round {found.round} of {found.rounds}{score}>"


def up(
    config: Federation | Mapping[str, Any] | PathLike | None = None,
    *,
    engine: str | None = None,
    runs_dir: PathLike = folders.RUNS,
    data_dir: PathLike | None = None,
    resume: PathLike | None = None,
    init: PathLike | None = None,
    quiet: bool = False,
) -> Run:
    """Run a federation, given as a YAML file, a dict or a `Federation`, to its end.

    Prints its progress unless `quiet`. An interrupt stops all its processes. With `resume` (a run's name or folder) an
    interrupted run continues, which needs no config.
    """
    from fl_privacy.deploy.running import run

    if init is not None and config is None:
        raise LaunchError("init: a resumed run has its own initial model; leave it out")
    data = _data(data_dir)
    federation = None if config is None else _federation(config, data)
    if federation is not None and init is not None:
        federation = federation.starting_from(Path(init))
    try:
        result = run(federation, engine, Path(runs_dir), data, resume, _console(quiet))
    except Interrupted as error:
        again = f"resume it with: fl_privacy.up(resume={json.dumps(str(error.run_dir))})"
        left = again if resume_words(error.run_dir) else "nothing to resume"
        print(f"interrupted; all processes have been stopped; {left}")
        raise
    if result.status != "completed":
        raise LaunchError(f"run {result.run} failed: {result.reason} (logs: {result.path}/logs)")
    return Run(result.path)


def runs(runs_dir: PathLike = folders.RUNS) -> list[Run]:
    """All runs in a folder, newest first."""
    return [Run(path) for path in folders.folders(Path(runs_dir))]


def _federation(config: Federation | Mapping[str, Any] | PathLike, data: Path | None = None) -> Federation:
    if isinstance(config, Federation):
        return config
    return Federation.of(config) if isinstance(config, Mapping) else Federation.load(config, data)


def _data(given: PathLike | None) -> Path | None:
    found = given or os.environ.get(DATA)
    return Path(found) if found else None


def _console(quiet: bool) -> Console:
    """A live line on a terminal; plain lines in a notebook, where control codes would show."""
    from rich.console import Console

    live = sys.stdout.isatty()
    return Console(quiet=quiet, force_terminal=live, force_jupyter=False, color_system="auto" if live else None)


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
