"""Accuracy by round with failing aggregators and links (ERIS, F.5): a CSV, and a figure per kind.

`python scripts/failures.py [FOLDER] --data-dir DIR`; what FOLDER has already is not run again. Sites and aggregators
are functions of one process here, the same ones that a federation's processes call: tests/test_failures.py compares
the results.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl_privacy.config import Federation
from fl_privacy.report.figures import Curve, curves
from fl_privacy.report.interval import mean_interval
from fl_privacy.round.settlement import CLOSED, Failures
from fl_privacy.round.shard_store import stepped
from fl_privacy.routes.base import only
from fl_privacy.routes.shards import ShardsRoute
from fl_privacy.tasks.workload import Workload
from fl_privacy.vector import Vector
from fl_privacy.wire.client import Release

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "eris" / "failures"
KINDS = {"aggregators": "of the aggregators miss a round", "links": "of the links fail"}
RATES = {"aggregators": (0.0, 0.3, 0.5, 0.7, 0.9), "links": (0.0, 0.3, 0.5, 0.8)}
CLAIMED = {"aggregators": 0.7, "links": 0.5}  # up to which nothing but speed is lost, says the paper
SEEDS = (1, 2, 3)
ROUNDS = 80
NEAR = 0.005  # accuracy
EVERY = 5  # rounds between evaluations

CONFIG = """
name: failures
seed: {seed}
sites: {sites}
rounds: {rounds}
quorum: 2
reproducible: true
audit: true
evaluate: server
task: {{{task}, model: mlp, hidden: [32], train: {{epochs: 1, batch_size: 16, lr: 0.05, momentum: 0.9}}}}
route: {{kind: shards, aggregators: {aggregators}, n_min: 2, settlement: partial, failures: {{{kind}: {rate}}}}}
"""
MNIST = "dataset: mnist, partition: {kind: iid, records: 200}"


class Size(NamedTuple):
    """The federation of every run."""

    task: str
    sites: int
    aggregators: int
    rounds: int
    every: int


class Point(NamedTuple):
    kind: str
    rate: float
    seed: int
    round: int
    accuracy: float
    loss: float


Cell = tuple[str, float]


def measured(cell: Cell, seed: int, size: Size, data_dir: Path | None) -> list[Point]:
    """One run, at some of its rounds."""
    federation = Federation.parse(CONFIG.format(kind=cell[0], rate=cell[1], seed=seed, **size._asdict()))
    work, found = Workload(federation, data_dir), list[Point]()
    for round, model in enumerate(models(federation, work)):
        if round % size.every == 0 or round == size.rounds:
            scored = work.evaluate(model)
            found.append(Point(*cell, seed, round, scored.accuracy or 0.0, scored.loss))
    return found


def models(federation: Federation, work: Workload) -> Iterator[Vector]:
    """The initial model, and that after every round."""
    route, model = only(federation.route, ShardsRoute, "failures"), work.initial.copy()
    shards = [shard.copy() for shard in route.parts(federation, model.size).split(model)]
    yield model
    for round in range(1, federation.rounds + 1):
        updates = [work.update(model, work.site_data(site), site, round) for site in federation.site_names]
        shards = _settled(federation, route, shards, updates, round)
        model = route.parts(federation, model.size).join(shards).copy()
        yield model


def _settled(
    federation: Federation, route: ShardsRoute, shards: list[Vector], updates: list[Vector], round: int
) -> list[Vector]:
    """The shards after a round, each of the updates that reached its aggregator."""
    names, cut = federation.site_names, route.cut(federation, updates[0].size)
    parts = [[part.copy() for part in cut.split(update)] for update in updates]
    everybody = (2 ** len(names) - 1).to_bytes(-(-len(names) // 8), "little")
    failures = Failures(route.failures.aggregators, route.failures.links, federation.seed)
    made = list(shards)
    left = failures.of([Release(CLOSED, members=everybody, senders=everybody)] * len(shards), round)
    for index, decision in enumerate(route.settling.decide(left, federation.quorum)):
        bits = int.from_bytes(decision.members, "little")
        there = [k for k in range(len(names)) if bits >> k & 1]
        if decision.problem:
            continue
        decoder = federation.coding.decoder(shards[index].size)
        rows = np.stack([parts[k][index] for k in there])
        senders = [names[k] for k in there]
        made[index], _ = stepped(
            federation, shards[index], {}, decoder, rows, senders, round, [""] * len(rows), [0] * len(rows)
        )
    return made


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


def by_cell(points: Sequence[Point]) -> dict[Cell, dict[int, list[Point]]]:
    """The rounds of every run in order, by seed."""
    cells: dict[Cell, dict[int, list[Point]]] = {}
    for one in sorted(points):
        cells.setdefault((one.kind, one.rate), {}).setdefault(one.seed, []).append(one)
    return cells


def draw(folder: Path, points: Sequence[Point]) -> None:
    """One figure per kind: the mean over seeds."""
    cells = by_cell(points)
    for kind, what in KINDS.items():
        found = []
        for (_, rate), seeds in ((cell, seeds) for cell, seeds in cells.items() if cell[0] == kind):
            means = [statistics.mean(one.accuracy for one in at) for at in zip(*seeds.values(), strict=True)]
            rounds = [one.round for one in next(iter(seeds.values()))]
            found.append(Curve(f"{rate:.0%} {what}", rounds, means))
        curves(folder / f"{kind}.svg", what, "round", "accuracy", found)


def table(points: Sequence[Point]) -> Iterator[str]:
    """Per cell, over the seeds: accuracy and loss as the paper takes them, and how fast they are reached."""
    cells = by_cell(points)
    titles = "accuracy, best round", "against no failures", "accuracy, last round", "best rounds"
    yield f"| kind | rate | {' | '.join(titles)} | rounds until {NEAR:.1%} below the best without failures |"
    yield "|---|---|---|---|---|---|---|"
    for (kind, rate), seeds in cells.items():
        plain = cells[kind, 0.0]
        tops = {seed: _best(run) for seed, run in seeds.items()}
        lost = [tops[seed].accuracy - _best(plain[seed]).accuracy for seed in seeds]
        last = [run[-1].accuracy for run in seeds.values()]
        near = [_reached(run, _best(plain[seed]).accuracy - NEAR) for seed, run in seeds.items()]
        yield " | ".join(
            (
                f"| {kind} | {rate:.0%}",
                _spread([one.accuracy for one in tops.values()]),
                "" if not rate else _spread(lost, "+"),
                _spread(last),
                ", ".join(str(one.round) for one in tops.values()),
                ", ".join("never" if round is None else str(round) for round in near) + " |",
            )
        )


def _best(run: Sequence[Point]) -> Point:
    """The round with the least loss (ERIS, F.5)."""
    return min(run, key=lambda one: one.loss)


def _reached(run: Sequence[Point], accuracy: float) -> int | None:
    return next((one.round for one in run if one.accuracy >= accuracy), None)


def _spread(values: Sequence[float], sign: str = "") -> str:
    mean, half = mean_interval(values)
    return f"{mean:{sign}.4f} (one seed)" if half is None else f"{mean:{sign}.4f} ± {half:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FL_PRIVACY_DATA"))
    parser.add_argument("--quick", action="store_true", help="bundled digits, one seed, two rates, few rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    given = parser.parse_args()
    size, seeds, rates = Size(MNIST, 6, 10, given.rounds, EVERY), given.seeds, RATES
    if given.quick:
        size, seeds, rates = Size("dataset: digits", 4, 4, 3, 1), (1,), dict.fromkeys(KINDS, (0.0, 0.5))
    path, points = given.folder / "accuracy.csv", kept(given.folder / "accuracy.csv")
    done = {(one.kind, one.rate, one.seed) for one in points}
    wanted = [(kind, rate, seed) for seed in seeds for kind in KINDS for rate in rates[kind]]
    # What the paper claims first; without failures, both kinds are the same run.
    for kind, rate, seed in sorted(wanted, key=lambda one: one[1] not in (0, CLAIMED[one[0]])):
        if (kind, rate, seed) in done:
            continue
        same = [one._replace(kind=kind) for one in points if rate == one.rate == 0 and one.seed == seed]
        points += same or measured((kind, rate), seed, size, given.data_dir)
        save(path, points)
    draw(given.folder, points)
    print(*table(points), sep="\n")


if __name__ == "__main__":
    main()
