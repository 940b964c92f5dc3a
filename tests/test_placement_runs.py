"""Whole runs whose sites aggregate: the same model, bit for bit, as with as many aggregator processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.models import kept
from fl_privacy.tasks.workload import model_of
from fl_privacy.vector import Vector

NAME = "residents"  # the same for both placements: keys are seeded by it


def config_of(sites: int, placement: str, /, **changes: Any) -> Federation:
    route = {"kind": "shards", "aggregators": sites, "placement": placement}
    fields: dict[str, Any] = {"name": NAME, "seed": 3, "sites": sites, "reproducible": True, "route": route}
    task = {"hidden": [8], "train": {"epochs": 1, "batch_size": 64}}
    evaluate = {"by": "sites", "alone": False}
    return Federation.model_validate({**fields, "task": task, "evaluate": evaluate, **changes})


def kept_by_sites(result: Result, runs: Path, config: Federation) -> list[Vector]:
    """The final model that each site keeps."""
    assert (result.status, result.rounds) == ("completed", config.rounds)
    states = [runs / "sites" / NAME / name for name in config.site_names]
    return [kept.received(state / "models", Path(result.path).name, "last").model for state in states]


def models_of(folder: Path, sites: int, placement: str, engine: str, /, **changes: Any) -> list[Vector]:
    config = config_of(sites, placement, **changes)
    return kept_by_sites(up(config, engine, folder / placement), folder / placement, config)


def same(one: list[Vector], other: list[Vector]) -> bool:
    return all(np.array_equal(model, one[0]) for model in (*one, *other))


@pytest.mark.e2e
def test_ten_sites_that_aggregate_make_the_model_of_ten_processes(tmp_path: Path) -> None:
    engines = {"sites": "local", "processes": "simulation"}
    made = [models_of(tmp_path, 10, placement, engine, rounds=2) for placement, engine in engines.items()]
    assert same(*made)


@pytest.mark.e2e
def test_with_shifted_compression_and_an_optimiser_too(tmp_path: Path) -> None:
    """The references of every site, and the moments, are at the sites."""
    changes: dict[str, Any] = {"rounds": 3, "compress": {"kind": "dsc", "p": 0.3}, "combine": {"kind": "fedadam"}}
    made = [models_of(tmp_path, 4, placement, "simulation", **changes) for placement in ("sites", "processes")]
    assert same(*made)


@pytest.mark.e2e
def test_from_a_given_model_and_with_private_training_too(tmp_path: Path) -> None:
    given, plain = tmp_path / "first.safetensors", config_of(3, "sites")
    save_file({name: torch.randn_like(value) for name, value in model_of(plain).state_dict().items()}, given)
    changes: dict[str, Any] = {"rounds": 1, "sites": {"count": 3, "epsilon": 8}, "init": str(given)}
    changes["privatise"] = {"kind": "dpsgd", "clip": 1.0}
    made = [models_of(tmp_path, 3, placement, "simulation", **changes) for placement in ("sites", "processes")]
    assert same(*made)


ALLOCATED = {"kind": "dpsgd", "allocation": "fulcrum", "budget": 3}


@pytest.mark.parametrize("privatise", [{"kind": "ldp"}, {"kind": "dpsgd"}, ALLOCATED], ids=str)
@pytest.mark.parametrize("masks", ["run", "round"])
def test_every_way_to_privatise_is_supported(privatise: dict[str, Any], masks: str) -> None:
    topology = {"topology": {"kind": "ring"}} if "allocation" in privatise else {}
    route = {"kind": "shards", "aggregators": 6, "placement": "sites", "masks": masks}
    config = config_of(6, "sites", route=route, sites={"count": 6, "epsilon": 8}, privatise=privatise, **topology)
    assert config.route.trust(config)[0].parties == config.site_names


@pytest.mark.e2e
def test_a_resumed_run_continues_from_the_shards_at_the_sites(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"compress": {"kind": "dsc", "p": 0.3}, "sites": {"count": 4, "epsilon": 4}}
    changes["privatise"] = {"kind": "ldp"}
    part, whole = (config_of(4, "sites", rounds=rounds, **changes) for rounds in (2, 4))
    first = up(part, "simulation", tmp_path / "resumed")
    resumed = up(whole, "simulation", tmp_path / "resumed", resume=first.path)
    unbroken = up(whole, "simulation", tmp_path / "unbroken")
    made = (kept_by_sites(resumed, tmp_path / "resumed", whole), kept_by_sites(unbroken, tmp_path / "unbroken", whole))
    assert same(*made)
