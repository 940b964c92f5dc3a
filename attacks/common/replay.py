"""Replaying attacks on a recorded run: what each found, and how much better than chance that is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.common.attack import ATTACKS, Attack, Unsuitable, known
from attacks.common.knowledge import Progress, knowledge_of, silent
from fl_privacy.errors import FederationError
from fl_privacy.report.interval import mean_interval
from fl_privacy.transcript import open_run
from fl_privacy.transcript.read import Run

if TYPE_CHECKING:
    from attacks.common.measure import Measure, Scores

SEEDS = 3
LONGEST = 200  # characters of a file name


def replay(
    run_dir: Path,
    names: Sequence[str] = (),
    data_dir: Path | None = None,
    seeds: int = SEEDS,
    progress: Progress = silent,
    observers: Sequence[str] = (),
) -> dict[str, Any]:
    """The measures of the named attacks, or of all that suit the run and these views, each as its observers see it.

    A measure is the mean over the attack's seeds, half the 95 % interval, and chance. Pictures of the first seed are
    written to the run's folder `attacks`.
    """
    chosen = [known(name) for name in names]
    if seeds < 1:
        raise FederationError(f"seeds: {seeds} is not positive; use 1 or more")
    run = open_run(run_dir)
    found, unsuitable = dict[str, Any](), list[Unsuitable]()
    for attack in chosen or applicable(run, observers):
        seen_by = observers_of(attack, run, observers)
        try:
            scores = _scores(attack, run, seen_by, data_dir, seeds, progress)
        except Unsuitable as error:
            if chosen:
                raise
            unsuitable.append(error)
            continue
        drawn = {"pictures": _draw(run, attack, seen_by, scores[0])} if scores[0].pictures else {}
        found[attack.name] = {"observers": list(seen_by), **_mean(scores), **drawn}
    if unsuitable and not found:
        raise unsuitable[0]
    return found


def applicable(run: Run, observers: Sequence[str] = ()) -> list[Attack[Any]]:
    """All attacks that can read these views; an error if none can."""
    found, problems = [], []
    for attack in map(known, ATTACKS):
        try:
            observers_of(attack, run, observers)
            found.append(attack)
        except FederationError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found


def observers_of(attack: Attack[Any], run: Run, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The parties that collude: those given, or all of the run whose view the attack can read."""
    there = run.observers
    usable = [name for name in there if any(fnmatchcase(name, pattern) for pattern in attack.observers)]
    missing = [name for name in given if name not in there]
    if missing:
        fix = f"use {', '.join(there)}, or record a run that has it, with `audit: true`"
        raise FederationError(f"observer: {run.path} has no view of {missing[0]!r}; {fix}")
    reads = ", ".join(usable) or f"a run with a view of {' or '.join(attack.observers)}"
    if strange := [name for name in given if name not in usable]:
        raise FederationError(f"observer: {attack.name} cannot use the view of {strange[0]}; use {reads}")
    if not usable:
        raise FederationError(f"observer: {run.path} has no view that {attack.name} can use; use {reads}")
    return tuple(name for name in usable if not given or name in given)


def keep(run_dir: Path, found: dict[str, Any]) -> None:
    """The scores of each attack and set of observers as a file in the run's folder `attacks`.

    NAME.json is as seen by all whose views the attack can use, NAME.OBSERVER+OBSERVER.json by a part of them.
    """
    run = open_run(run_dir)
    for name, scored in found.items():
        file = _file(run, known(name), tuple(scored["observers"]), ".json")
        file.write_text(json.dumps(scored, indent=1) + "\n")


def _file(run: Run, attack: Attack[Any], seen_by: tuple[str, ...], ending: str) -> Path:
    """Where something of an attack as seen by these observers is kept."""
    label = "" if seen_by == observers_of(attack, run) else "." + "+".join(seen_by)
    if len(label) > LONGEST:
        label = f".{len(seen_by)}-observers-{hashlib.sha256(label.encode()).hexdigest()[:12]}"
    folder = run.path / "attacks"
    folder.mkdir(exist_ok=True)
    return folder / f"{attack.name}{label}{ending}"


def _draw(run: Run, attack: Attack[Any], seen_by: tuple[str, ...], scores: Scores) -> list[str]:
    """The attack's pictures as files; returns their paths in the run's folder."""
    files = {_file(run, attack, seen_by, f".{name}.png"): content for name, content in scores.pictures.items()}
    for path, content in files.items():
        path.write_bytes(content)
    return [str(path.relative_to(run.path)) for path in files]


def _scores(
    attack: Attack[Any], run: Run, observers: Sequence[str], data_dir: Path | None, seeds: int, progress: Progress
) -> list[Scores]:
    from attacks.common.truth import Truth

    truth = Truth(run, data_dir)
    views = {name: run.view(name) for name in observers}
    knowledge = knowledge_of(truth.federation, data_dir, attack.needs, progress)
    findings = [attack.run(views, knowledge, seed) for seed in range(seeds)]
    return [attack.score(found, truth) for found in findings]


def _mean(scored: list[Scores]) -> dict[str, Any]:
    """One answer out of those of several seeds; a measure that some seed could not take is left out."""
    first = scored[0]
    names = [name for name in first.measures if all(name in one.measures for one in scored)]
    measures = {name: _measure([one.measures[name] for one in scored]) for name in names}
    curves = {
        name: {at: mean_interval([one.curves[name][at] for one in scored])[0] for at in points}
        for name, points in first.curves.items()
    }
    notes = {"notes": list(first.notes)} if first.notes else {}
    return {"measures": measures, "curves": curves, "seeds": len(scored), **notes}


def _measure(found: list[Measure]) -> dict[str, Any]:
    value, half = mean_interval([one.value for one in found])
    chance, _ = mean_interval([one.chance for one in found])
    groups = {key: mean_interval([one.groups[key] for one in found])[0] for key in found[0].groups}
    return {"value": value, "half_interval": half, "chance": chance, "groups": groups}
