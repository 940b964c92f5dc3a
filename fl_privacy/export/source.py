"""Where the model of a run is: in the server's run folder, or at a site that received it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from fl_privacy.config import Federation
from fl_privacy.config.changes import config_of
from fl_privacy.deploy import ledgers
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.errors import FederationError, TranscriptError
from fl_privacy.models import kept
from fl_privacy.models.kept import Kept, Which
from fl_privacy.ops.runs import RUNS, find, folders
from fl_privacy.round.best import Best
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.transcript import open_run
from fl_privacy.transcript.files import file_sha256
from fl_privacy.transcript.read import Run
from fl_privacy.transcript.run import MANIFEST
from fl_privacy.vector import Layout, Vector

MODEL = "model"  # its name in checkpoints and views
LAST, BEST = "last", "best"


@dataclass(frozen=True)
class Found:
    """A model, and what is known where it was found: `run` at the server, `site` at a site."""

    federation: Federation
    name: str  # of the run
    round: int
    rounds: int  # how many the run has done, as far as is known
    model: Vector
    layout: Layout
    states: dict[str, Path]  # the folders of the sites on this machine
    metrics: dict[str, Any]
    run: Run | None = None
    site: str | None = None
    code: str | None = None  # digest of task code that the owner of a kit runs, besides what sites here accepted


def locate(source: str | Path, round: str = LAST, run: str | None = None, runs_dir: Path = RUNS) -> Found:
    """The model of a run (by name or folder), or of a kit's newest run or the one named `run`."""
    path = Path(source)
    if (path / "kit.yaml").is_file():
        return _of_kit(Folder.open(path), round, run)
    if run is not None:
        raise FederationError(f"run: {source} is a run itself; leave --run out, or give a kit")
    return of_run(find(source, runs_dir), round)


def _of_kit(folder: Folder, round: str, run: str | None) -> Found:
    if folder.role.starts_runs:
        runs = folder.path / folder.kit.runs
        there = [path.name for path in folders(runs)]
        found = of_run(find(_chosen(folder, there, run), runs), round)
        return replace(found, code=folder.federation.task.sha256)
    if not folder.role.has_node:
        raise FederationError(f"kit {folder.path}: a {folder.kit.role} keeps no model; use a site's kit")
    models = folder.state / "models"
    name = _chosen(folder, kept.runs(models)[::-1], run)
    candidates = list(_kept(models, name))
    picked = _pick(candidates, round)
    if picked is None:
        has = ", ".join(f"{one.which} is round {one.round}" for one in candidates) or "none"
        raise FederationError(f"round: {folder.kit.name} has no model after round {round} of {name}; there: {has}")
    rounds = max(one.round for one in candidates)
    terms = (folder.own_federation, name, picked.round, rounds, picked.model, picked.layout)
    return Found(*terms, {folder.kit.name: folder.state}, dict(picked.metrics), site=folder.kit.name)


def _chosen(folder: Folder, runs: list[str], run: str | None) -> str:
    """The run that was asked for, or the newest one."""
    if run is None and runs:
        return runs[0]
    if run in runs:
        return str(run)
    there = f"; runs there: {', '.join(runs[:5])}" if runs else ""
    raise FederationError(f"kit {folder.path}: has no model of {run or 'any run yet'}{there}")


def of_run(path: Path, round: str = LAST) -> Found:
    """The model of a run folder: from a checkpoint, a view, or what sites on this machine received."""
    run = open_run(path)
    federation = config_of(run.manifest, str(path / MANIFEST))
    layout, rows = _layout(run), {row["round"]: row for row in run.metrics if isinstance(row.get("round"), int)}
    rounds = max(rows, default=0)
    number = _number(run, federation, round, rows)
    model = next(_models(run, federation, number), None)
    if model is None:
        has = f"the run has {rounds} rounds" if number > rounds else "it is not kept here"
        fix = "use last or best, or export it at a site, from its kit"
        raise FederationError(f"round: {path} has no model after round {number}: {has}; {fix}")
    if model.shape != (layout.size,):
        raise TranscriptError(f"{path}: its model has shape {model.shape}, not the {layout.size} of its layout")
    states = {name: _sites(run, federation) / name for name in federation.site_names}
    return Found(federation, path.name, number, rounds, model, layout, states, rows.get(number, {}), run)


def _layout(run: Run) -> Layout:
    try:
        return Layout.from_json(run.manifest["layout"])
    except (KeyError, TypeError, ValueError, FederationError):
        raise TranscriptError(f"{run.path / MANIFEST}: layout is missing or malformed") from None


def _number(run: Run, federation: Federation, round: str, rows: dict[int, Any]) -> int:
    """Which round is meant."""
    if round == LAST:
        return max(_checkpoints(run).rounds(), default=max(rows, default=0))
    if round == BEST:
        best = Best(federation.stop)
        best.recall(rows.values())
        if best.round is None:
            raise FederationError(f"round: {run.path} has no evaluated round; use last")
        return best.round
    if round.isdecimal() and len(round) < 10:
        return int(round)
    raise FederationError(f"round: {round!r} is not a round; use last, best or a number")


def _sites(run: Run, federation: Federation) -> Path:
    """Where engines on this machine keep what belongs to sites."""
    return ledgers.folder(federation, run.path.parent)


def _checkpoints(run: Run) -> Checkpoints:
    return Checkpoints(run.path / "checkpoints")


def _models(run: Run, federation: Federation, round: int) -> Iterator[Vector]:
    """The model after a round, from every place that may have it."""
    checkpoints = _checkpoints(run)
    if any(step.closes for step in federation.steps):  # readable at the sites alone
        yield from _at_sites(run, federation, round)
        return
    if round in checkpoints.rounds():
        _check(run, checkpoints.path(round))
        yield from _named(checkpoints.load(round))
    # The server's view has the model that each round starts from, an evaluator's the one that it ends with.
    for observer, at in (("server", round + 1), ("evaluator", round)):
        if observer in run.observers and at in (view := run.view(observer)).rounds:
            yield from _named(view.round(at).arrays)
    yield from _at_sites(run, federation, round)


def _at_sites(run: Run, federation: Federation, round: int) -> Iterator[Vector]:
    """What sites on this machine received."""
    for folder in sorted(_sites(run, federation).glob("*/models")):
        yield from (one.model for one in _kept(folder, run.path.name) if one.round == round)


def _named(arrays: dict[str, Any]) -> Iterator[Vector]:
    if MODEL in arrays:
        yield arrays[MODEL]


def _check(run: Run, path: Path) -> None:
    """The files of a closed run are pinned by its manifest."""
    digest = run.manifest["files"].get(path.relative_to(run.path).as_posix())
    if digest is not None and digest != file_sha256(path):
        raise TranscriptError(f"{path}: changed since the run was signed; see fl-privacy transcript verify {run.path}")


def _kept(folder: Path, run: str) -> Iterator[Kept]:
    """What a site received of a run."""
    for which in get_args(Which):
        if (folder / run / f"{which}.safetensors").is_file():
            yield kept.received(folder, run, which)


def _pick(candidates: list[Kept], round: str) -> Kept | None:
    return next((one for one in candidates if round in (one.which, str(one.round))), None)
