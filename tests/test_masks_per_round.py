"""`masks: round`: every round has masks of its own, and the evaluator cuts the model for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from attacks.inversion.gradients import coordinates
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import ConfigError
from fl_privacy.models import kept
from fl_privacy.routes.cut import Cut
from fl_privacy.vector import Vector
from fl_privacy.wire import client
from helpers import CALL, Deployment, Keys, deploy, kill, round_header, status, submit
from inprocess import federation, updates
from test_aggregator import newest, open_shard, play_shard, seed, settle, step

LENGTH = 300
CUTS = ("run", "round")
CHANGING = {"kind": "shards", "aggregators": 2, "n_min": 3, "masks": "round"}


@given(st.integers(1, 6), st.integers(6, 400), st.integers(0, 2**32), st.integers(1, 50))
def test_every_round_splits_and_joins_along_masks_of_its_own(count: int, parameters: int, key: int, round: int) -> None:
    cut = Cut(parameters, count, key, per_round=True)
    vector = np.random.default_rng(key).normal(size=parameters).astype(np.float32)
    shards = [shard.copy() for shard in cut.at(round).split(vector)]
    assert [shard.size for shard in shards] == cut.sizes()
    assert np.array_equal(cut.at(round).join(shards), vector)
    assert np.array_equal(Cut(parameters, count, key, per_round=True).at(round).owners, cut.owners)
    assert sorted(np.bincount(cut.owners, minlength=count)) == sorted(cut.sizes())


def test_over_the_rounds_an_aggregator_sees_coordinates_like_independent_draws() -> None:
    """Of all coordinates, 1 - (1 - 1/A)^T are with an aggregator at least once in T rounds."""
    parameters, count, rounds = 40_000, 4, 6
    cut = Cut(parameters, count, 5, per_round=True)
    owners = [cut.at(round).owners.copy() for round in range(1, rounds + 1)]
    for one, other in pairwise(owners):
        assert np.mean(one == other) == pytest.approx(1 / count, abs=0.01)
    seen = np.any([mine == 0 for mine in owners], axis=0)
    assert seen.mean() == pytest.approx(1 - (1 - 1 / count) ** rounds, abs=0.01)


@pytest.mark.parametrize("masks", CUTS)
def test_every_coordinate_reaches_one_aggregator_and_other_parties_get_no_part(masks: str) -> None:
    parts = Federation.parse(f"sites: 3\nroute: {{kind: shards, masks: {masks}}}").route.parts(Federation(sites=3), 500)
    for round in (1, 2):
        mine = [parts.at(round).coordinates(f"aggregator-{k}") for k in range(3)]
        assert sorted(np.concatenate([one for one in mine if one is not None])) == list(range(500))
        assert parts.at(round).coordinates("evaluator") is None


def test_masks_of_the_run_do_not_change() -> None:
    cut = Cut(1000, 3, 5)
    assert np.array_equal(cut.at(1).owners, cut.at(2).owners)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compress": {"kind": "dsc", "p": 0.1}}, "compress.kind: dsc keeps references"),
        ({"combine": {"kind": "fedadam"}}, "combine.kind: fedadam keeps moments"),
        ({"combine": {"kind": "fedyogi"}}, "combine.kind: fedyogi keeps moments"),
        ({"route": {**CHANGING, "settlement": "partial"}}, "route.settlement: partial keeps old shards"),
    ],
)
def test_what_keeps_state_per_coordinate_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=named):
        federation(**{"route": CHANGING, **changes})


def test_evaluator_and_server_together_are_named_as_trusted() -> None:
    """The evaluator could give out an old model again, and the server open another cohort for it."""
    configs = {masks: federation(route={**CHANGING, "masks": masks}) for masks in CUTS}
    named = {masks: [str(one) for one in config.route.trust(config)] for masks, config in configs.items()}
    assert "evaluator, server together can see every update and who sent it" in named["round"]
    assert not any("server" in one for one in named["run"])


def test_the_attacks_know_the_masks_of_a_round() -> None:
    config = federation(route=CHANGING)
    first, second = (coordinates(config, "aggregator-0", LENGTH, round) for round in (1, 2))
    assert first.sum() == second.sum() == LENGTH // 2
    assert not np.array_equal(first, second)
    assert np.array_equal(first, ~coordinates(config, "aggregator-1", LENGTH, 1))


@contextmanager
def running(folder: Path, masks: str = "round") -> Iterator[Deployment]:
    keys = Keys(folder / "pki")
    deployment = deploy(folder, keys, federation(route={**CHANGING, "masks": masks}), "aggregator")
    try:
        yield deployment
    finally:
        deployment.stop()


def test_a_round_opens_only_on_the_shard_that_the_evaluator_cut_and_a_restart_keeps_it(tmp_path: Path) -> None:
    start, cut, rows = updates(1, LENGTH)[0], updates(1, LENGTH, seed=1)[0], updates(3, LENGTH, seed=2)
    with running(tmp_path) as aggregator:
        seed(aggregator, "run", start)
        first = round_header("run", 1, LENGTH)
        play_shard(aggregator, first, rows)
        assert status(seed, aggregator, "run", cut, 1) == "FAILED_PRECONDITION"  # the round is not settled
        settle(aggregator, first)
        left = step(start, rows)
        assert newest(aggregator, "run")[0] == 1
        assert np.array_equal(newest(aggregator, "run")[1], left)

        second = round_header("run", 2, LENGTH)
        assert status(open_shard, aggregator, second, left) == "FAILED_PRECONDITION"  # nobody cut the model yet
        for stub in (aggregator.server, aggregator.site(0)):
            assert status(client.seed, stub, "run", 1, cut, CALL) == "PERMISSION_DENIED"
        assert status(seed, aggregator, "run", cut[:-1], 1) == "INVALID_ARGUMENT"
        assert status(seed, aggregator, "run", cut, 2) == "FAILED_PRECONDITION"
        assert status(seed, aggregator, "run", np.full(LENGTH, np.nan, np.float32), 1) == "INVALID_ARGUMENT"
        seed(aggregator, "run", cut, 1)
        assert status(seed, aggregator, "run", start, 1) == "ALREADY_EXISTS"
        kill(aggregator)

    with running(tmp_path) as aggregator:
        assert np.array_equal(newest(aggregator, "run")[1], left)  # what the evaluator joins
        second = round_header("run", 2, LENGTH)
        play_shard(aggregator, second, rows)  # what sites train on
        settle(aggregator, second)
        assert np.array_equal(newest(aggregator, "run")[1], step(cut, rows))


def test_with_masks_of_the_run_nobody_replaces_a_shard(tmp_path: Path) -> None:
    with running(tmp_path, "run") as deployment:
        shard, round = updates(1, LENGTH)[0], round_header("run", 1, LENGTH)
        seed(deployment, "run", shard)
        open_shard(deployment, round)
        for index, row in enumerate(updates(3, LENGTH)):
            submit(deployment.site(index), round, row)
        assert status(seed, deployment, "run", shard, 1) == "PERMISSION_DENIED"


def final_models(folder: Path, engine: str, masks: str, by: str = "server", rounds: int = 3) -> list[Vector]:
    """The last model as each site keeps it."""
    fields = {"name": "changing", "seed": 3, "sites": 4, "reproducible": True, "rounds": rounds}
    task = {"hidden": [8], "train": {"epochs": 1, "batch_size": 64}}
    route = {"kind": "shards", "aggregators": 3, "masks": masks}
    evaluate = {"by": by, "alone": False} if by == "sites" else {"by": by}
    config = Federation.model_validate({**fields, "task": task, "route": route, "evaluate": evaluate})
    result = up(config, engine, folder / masks)
    assert (result.status, result.rounds) == ("completed", rounds)
    states = [folder / masks / "sites" / config.name / name for name in config.site_names]
    return [kept.received(state / "models", Path(result.path).name, "last").model for state in states]


@pytest.mark.e2e
@pytest.mark.parametrize(("engine", "by"), [("local", "server"), ("simulation", "sites")])
def test_the_model_is_that_of_masks_of_the_run(tmp_path: Path, engine: str, by: str) -> None:
    """Bit for bit: which aggregator adds a coordinate up does not change the sum."""
    changing = final_models(tmp_path, engine, "round", by)
    fixed = final_models(tmp_path, "simulation", "run", by)
    assert all(np.array_equal(model, fixed[0]) for model in (*changing, *fixed))
