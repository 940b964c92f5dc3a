"""Whole runs whose sites aggregate: the same model, bit for bit, as with as many aggregator processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.models import kept
from fl_privacy.vector import Vector

NAME = "residents"  # the same for both placements: keys are seeded by it


def models_of(folder: Path, sites: int, placement: str, engine: str, **changes: Any) -> list[Vector]:
    """The final model that each site keeps."""
    route = {"kind": "shards", "aggregators": sites, "placement": placement}
    fields: dict[str, Any] = {"name": NAME, "seed": 3, "sites": sites, "reproducible": True, "route": route}
    task = {"hidden": [8], "train": {"epochs": 1, "batch_size": 64}}
    evaluate = {"by": "sites", "alone": False}
    config = Federation.model_validate({**fields, "task": task, "evaluate": evaluate, **changes})
    result = up(config, engine, folder / placement)
    assert (result.status, result.rounds) == ("completed", config.rounds)
    states = [folder / placement / "sites" / NAME / name for name in config.site_names]
    return [kept.received(state / "models", Path(result.path).name, "last").model for state in states]


def same(one: list[Vector], other: list[Vector]) -> bool:
    return all(np.array_equal(model, one[0]) for model in (*one, *other))


@pytest.mark.e2e
def test_ten_sites_that_aggregate_make_the_model_of_ten_processes(tmp_path: Path) -> None:
    made = [models_of(tmp_path, 10, placement, "local", rounds=2) for placement in ("sites", "processes")]
    assert same(*made)


@pytest.mark.e2e
def test_with_shifted_compression_and_an_optimiser_too(tmp_path: Path) -> None:
    """The references of every site, and the moments, are at the sites."""
    changes: dict[str, Any] = {"rounds": 3, "compress": {"kind": "dsc", "p": 0.3}, "combine": {"kind": "fedadam"}}
    made = [models_of(tmp_path, 4, placement, "simulation", **changes) for placement in ("sites", "processes")]
    assert same(*made)
