"""The results on failing aggregators and links come from the functions that a federation's processes call."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.tasks.workload import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
failures = importlib.import_module("failures")

SIZE = failures.Size("dataset: digits", 4, 4, 3, 1)


@pytest.mark.e2e
@pytest.mark.parametrize("cell", [("aggregators", 0.5), ("links", 0.3)])
def test_a_simulated_federation_has_the_same_models(cell: tuple[str, float], tmp_path: Path) -> None:
    federation = Federation.parse(failures.CONFIG.format(kind=cell[0], rate=cell[1], seed=1, **SIZE._asdict()))
    result = up(federation, "simulation", tmp_path)
    assert result.status == "completed", result.reason
    lines = map(json.loads, (Path(result.path) / "metrics.jsonl").read_text().splitlines())
    measured = failures.measured(cell, 1, SIZE, None)
    assert [(one.round, one.accuracy, one.loss) for one in measured] == [
        (line["round"], line["accuracy"], line["loss"]) for line in lines
    ]


def test_a_shard_whose_aggregator_is_missing_keeps_its_value() -> None:
    text = failures.CONFIG.format(kind="aggregators", rate=0.5, seed=1, **SIZE._asdict())
    federation = Federation.parse(text)
    owners = federation.route.cut(federation, Workload(federation).layout.size).owners
    for before, after in zip(made := list(failures.models(federation, Workload(federation))), made[1:], strict=False):
        changed = [bool(np.any(before[owners == k] != after[owners == k])) for k in range(SIZE.aggregators)]
        assert sum(changed) == 2


def test_the_table_compares_with_the_run_of_the_same_seed_without_failures() -> None:
    points = [
        failures.Point("links", rate, seed, round, 0.1 * seed + 0.01 * round - rate / 10, 1 / (round + 1))
        for rate in (0.0, 0.5)
        for seed in (1, 2)
        for round in range(3)
    ]
    head, _, plain, failing = failures.table(points)
    assert head.count("|") == plain.count("|") == failing.count("|")
    assert "0.1700 ±" in plain
    assert "-0.0500 ± 0.0000" in failing
    assert plain.endswith("| 2, 2 |")
    assert failing.endswith("| never, never |")
