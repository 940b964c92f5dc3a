"""Replaying attacks on a recorded run: what each found, and how much better than chance that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.report.interval import mean_interval
from fl_privacy.transcript import open_run

SEEDS = 3

Progress = Callable[[str], None]


def replay(
    run_dir: Path,
    names: Sequence[str],
    data_dir: Path | None = None,
    seeds: int = SEEDS,
    progress: Progress = lambda step: None,
) -> dict[str, Any]:
    """The measures of every named attack: mean over the attack's seeds, half the 95 % interval, and chance."""
    for name in names:
        known(name)
    if seeds < 1:
        raise FederationError(f"seeds: {seeds} is not positive; use 1 or more")
    return {name: _mean(ATTACKS[name](run_dir, data_dir, seeds, progress)) for name in names}


def _privacy_inference(run_dir: Path, data_dir: Path | None, seeds: int, progress: Progress) -> list[dict[str, Any]]:
    from attacks import privacy_inference, scores
    from attacks.truth import reveal

    run = open_run(run_dir)
    federation = Federation.model_validate(run.manifest["config"])
    view = run.view("server")
    knowledge = privacy_inference.Knowledge(federation, data_dir, progress)
    findings = [privacy_inference.run(view, knowledge, seed) for seed in range(seeds)]
    truth = reveal(run, findings[0].seen, data_dir)
    return [scores.score(found, truth) for found in findings]


ATTACKS = {"privacy-inference": _privacy_inference}


def known(name: str) -> None:
    """Refuse an attack that there is not."""
    if name not in ATTACKS:
        raise FederationError(f"attack: {name!r} is unknown; use {', '.join(ATTACKS)}")


def _mean(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer out of those of several seeds; a measure that some seed could not take is left out."""
    first = scored[0]
    names = [name for name in first["measures"] if all(name in one["measures"] for one in scored)]
    measures = {name: _measure([one["measures"][name] for one in scored]) for name in names}
    curves = {
        name: {at: mean_interval([one["curves"][name][at] for one in scored])[0] for at in points}
        for name, points in first["curves"].items()
    }
    return {"measures": measures, "curves": curves, "seeds": len(scored)}


def _measure(found: list[dict[str, Any]]) -> dict[str, Any]:
    value, half = mean_interval([one["value"] for one in found])
    chances = [one["chance"] for one in found if one["chance"] is not None]
    groups = {key: mean_interval([one["groups"][key] for one in found])[0] for key in found[0]["groups"]}
    chance = mean_interval(chances)[0] if chances else None
    return {"value": value, "half_interval": half, "chance": chance, "groups": groups}
