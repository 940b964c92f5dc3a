"""Accuracy by round with failing aggregators and links (ERIS, F.5), in simulation: a CSV, and a figure per kind.

`python scripts/failures.py [FOLDER]`; what FOLDER has already is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.report.figures import Curve, curves

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "eris" / "failures"
KINDS = {"aggregators": "of the aggregators miss a round", "links": "of the links fail"}
RATES = (0.0, 0.3, 0.5, 0.7, 0.9)
SEEDS = (1, 2)
ROUNDS = 60

CONFIG = """
name: failures
seed: {seed}
sites: {sites}
rounds: {rounds}
quorum: 2
reproducible: true
audit: true
task: {{dataset: digits, model: mlp, train: {{epochs: 1, batch_size: 16, lr: 0.1, momentum: 0.9}}}}
route: {{kind: shards, aggregators: {sites}, n_min: 2, settlement: partial, failures: {{{kind}: {rate}}}}}
"""


class Point(NamedTuple):
    kind: str
    rate: float
    seed: int
    round: int
    accuracy: float
    loss: float


def measured(kind: str, rate: float, seed: int, rounds: int, sites: int, folder: Path) -> list[Point]:
    """One run, round by round."""
    federation = Federation.parse(CONFIG.format(kind=kind, rate=rate, seed=seed, rounds=rounds, sites=sites))
    result = up(federation, "simulation", folder)
    if result.status != "completed":
        raise SystemExit(f"{kind} {rate}, seed {seed}: {result.reason}")
    lines = (Path(result.path) / "metrics.jsonl").read_text().splitlines()
    return [Point(kind, rate, seed, m["round"], m["accuracy"], m["loss"]) for m in map(json.loads, lines)]


def kept(path: Path) -> list[Point]:
    """What an earlier call measured."""
    if not path.exists():
        return []
    with path.open() as file:
        rows = [(r["kind"], r["rate"], r["seed"], r["round"], r["accuracy"], r["loss"]) for r in csv.DictReader(file)]
    return [Point(kind, float(p), int(s), int(t), float(a), float(b)) for kind, p, s, t, a, b in rows]


def save(path: Path, points: Sequence[Point]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows(one._replace(accuracy=round(one.accuracy, 4), loss=round(one.loss, 4)) for one in points)


def draw(folder: Path, points: Sequence[Point]) -> None:
    """One figure per kind: the mean over seeds."""
    for kind, what in KINDS.items():
        found = []
        for rate in sorted({one.rate for one in points}):
            mine = [one for one in points if one.kind == kind and one.rate == rate]
            rounds = sorted({one.round for one in mine})
            means = [statistics.mean(one.accuracy for one in mine if one.round == t) for t in rounds]
            found.append(Curve(f"{rate:.0%} {what}", rounds, means))
        curves(folder / f"{kind}.svg", f"digits, {what}", "round", "accuracy", found)


def table(points: Sequence[Point]) -> Iterator[str]:
    """Per cell, over the seeds: the last and the best accuracy, and how many rounds 95 % of the best takes."""
    yield "| kind | rate | last accuracy | best accuracy | rounds to 95 % of the best without failures |"
    yield "|---|---|---|---|---|"
    cells: dict[tuple[str, float], dict[int, list[Point]]] = {}
    for one in points:
        cells.setdefault((one.kind, one.rate), {}).setdefault(one.seed, []).append(one)
    for (kind, rate), seeds in cells.items():
        goals = {seed: 0.95 * _best(cells[kind, 0.0][seed]) for seed in seeds}
        reached = [min((p.round for p in seeds[s] if p.accuracy >= goals[s]), default=None) for s in seeds]
        late = ", ".join("never" if round is None else str(round) for round in reached)
        last, best = ([of(seeds[s]) for s in seeds] for of in (_last, _best))
        yield f"| {kind} | {rate:.0%} | {_spread(last)} | {_spread(best)} | {late} |"


def _last(points: Sequence[Point]) -> float:
    return max(points, key=lambda one: one.round).accuracy


def _best(points: Sequence[Point]) -> float:
    return max(one.accuracy for one in points)


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else " (one seed)"
    return f"{statistics.mean(values):.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--quick", action="store_true", help="one seed, two rates, few rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--runs-dir", type=Path, help="keep the runs here")
    given = parser.parse_args()
    rates, seeds, rounds, sites = (
        ((0.0, 0.5), (1,), 3, 4) if given.quick else (given.rates, given.seeds, given.rounds, 10)
    )
    path, points = given.folder / "accuracy.csv", kept(given.folder / "accuracy.csv")
    done = {(one.kind, one.rate, one.seed) for one in points}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, rate, seed in ((kind, rate, seed) for seed in seeds for kind in KINDS for rate in rates):
            if (kind, rate, seed) in done:
                continue
            # Without failures, both kinds are the same run.
            same = [one._replace(kind=kind) for one in points if rate == one.rate == 0 and one.seed == seed]
            points += same or measured(kind, rate, seed, rounds, sites, given.runs_dir or Path(scratch))
            save(path, points)
    draw(given.folder, points)
    print(*table(sorted(points)), sep="\n")


if __name__ == "__main__":
    main()
