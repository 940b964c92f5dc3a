"""Seconds per round of the local engine against stock Flower's FedAvg: same task, model, recipe, partition and machine.

A round lasts from the end of one evaluation to the end of the next, on the server's clock, in both. The first round is
left out. Both call the same training and evaluation functions, so only the way a round is run differs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.result import Result
from benchmarks.stock_engine import Stock
from fl_privacy.config import Federation, Partition, Site, Task, Training
from fl_privacy.deploy.engines import engine
from fl_privacy.ops.tail import Tail

ROUNDS, QUICK_ROUNDS = 7, 2
PER_MESSAGE = 20
WIDE, QUICK_WIDE = (3314, 3314), (331, 331)  # 11.23 M and 0.13 M parameters on 8x8 digits
TIMEOUT = 600.0

Evaluation = dict[str, Any]  # has at least `time` and `accuracy`

SMALL = Task(partition=Partition(kind="dirichlet", alpha=0.5), train=Training(epochs=5, batch_size=16, lr=0.1))
# One step of one large batch, so that a round is mostly transport.
LARGE = Training(epochs=1, batch_size=1024, lr=0.01)


def small(quick: bool = False) -> list[Result]:
    """The quickstart's task at five sites, with one message per round and with one for twenty."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    once = _federation("small", 2 if quick else 5, SMALL, rounds)
    # Two messages start rounds 2 to 41, as with twenty rounds per message.
    per_message = QUICK_ROUNDS if quick else PER_MESSAGE
    many = _federation("small-many", len(once.sites), SMALL, (1 if quick else 2) * per_message + 1, per_message)
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder:
        stock = _stock(once, folder, forks=quick)
        ours, batched = _ours(once, folder, quick), _ours(many, folder, quick)
    return [
        _compare("rounds, digits, 1 per message", ours, stock, 0.6),
        _compare(f"rounds, digits, {per_message} per message", batched, stock, 0.1),
    ]


def large(quick: bool = False) -> list[Result]:
    """A model of 11.2 M parameters at three sites."""
    task = Task(hidden=QUICK_WIDE if quick else WIDE, train=LARGE)
    federation = _federation("large", 2 if quick else 3, task, QUICK_ROUNDS if quick else ROUNDS)
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder:
        stock, ours = _stock(federation, folder, forks=quick), _ours(federation, folder, quick)
    return [_compare(f"rounds, {0.1 if quick else 11.2} M parameters", ours, stock, 0.8)]


def _federation(name: str, sites: int, task: Task, rounds: int, per_message: int = 1) -> Federation:
    return Federation(
        name=name,
        seed=7,
        sites=tuple(Site(name=f"site-{i}") for i in range(sites)),
        task=task,
        rounds=rounds,
        rounds_per_message=per_message,
        route={"kind": "shuffler", "n_min": 2},
    )


def _ours(federation: Federation, folder: str, quick: bool) -> list[Evaluation]:
    """The quick size is for trying the benchmark, not for its numbers: it saves the start of all processes."""
    result = engine.up(federation, "simulation" if quick else "local", Path(folder))
    if result.status != "completed":
        raise RuntimeError(f"{federation.name}: the run failed: {result.reason}")
    events = Tail(Path(result.path, "logs", "server.log")).poll()
    return [event for event in events if event["event"] == "evaluated"]


def _stock(federation: Federation, folder: str, forks: bool = False) -> list[Evaluation]:
    return Stock().up(federation, Path(folder), TIMEOUT, forks)


def _seconds(evaluations: Sequence[Evaluation]) -> list[float]:
    """Seconds of every round but the first, given the times of the evaluations from round 0 on."""
    times = [float(evaluation["time"]) for evaluation in evaluations]
    return [after - before for before, after in pairwise(times[1:])]


def _compare(name: str, ours: Sequence[Evaluation], stock: Sequence[Evaluation], limit: float) -> Result:
    detail: dict[str, Any] = {}
    for prefix, evaluations in (("", ours), ("stock_", stock)):
        seconds = _seconds(evaluations)
        detail[f"{prefix}seconds"] = round(statistics.mean(seconds), 3)
        detail[f"{prefix}slowest"] = round(max(seconds), 3)
        detail[f"{prefix}rounds"] = len(seconds)
        detail[f"{prefix}accuracy"] = round(evaluations[-1]["accuracy"], 4)
    return Result(name, detail["seconds"] / detail["stock_seconds"], limit, "x stock", detail=detail)
