"""The metadata attack: everything on the baseline, nothing through the shuffler."""

from __future__ import annotations

from pathlib import Path

import pytest

import attacks
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up

CONFIG = """
name: metadata-{kind}
seed: 5
sites: 8
cohort: 6
quorum: 6
rounds: {rounds}
audit: true
task: {{train: {{epochs: 1}}}}
route: {route}
"""


def measured(folder: Path, kind: str, route: str, rounds: int) -> dict[str, dict[str, float]]:
    text = CONFIG.format(kind=kind, route=route, rounds=rounds)
    result = up(Federation.parse(text), "simulation", folder)
    assert result.status == "completed", result.reason
    return attacks.replay(Path(result.path), ["metadata"], seeds=1)["metadata"]["measures"]


@pytest.mark.e2e
def test_the_baseline_tells_everything(tmp_path: Path) -> None:
    found = measured(tmp_path, "server", "{kind: server}", 4)["attribution"]
    assert found["value"] > 0.99 > 2 * found["chance"]


@pytest.mark.e2e
def test_through_the_shuffler_metadata_attribute_no_better_than_chance(tmp_path: Path) -> None:
    found = measured(tmp_path, "shuffled", "{kind: shuffler, level: model, n_min: 3}", 40)
    value, chance = found["attribution"]["value"], found["attribution"]["chance"]
    assert abs(value - chance) <= found["attribution interval"]["value"]
