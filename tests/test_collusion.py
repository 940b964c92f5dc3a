"""Colluding observers, and attacks from other packages, on a real sharded run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attacks
import colluding
from attacks.common.replay import observers_of
from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.shard import masks
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript import open_run
from fl_privacy.transcript.events import Row

SITES, AGGREGATORS, ROUNDS, SEED = 3, 3, 2, 11
CONFIG = f"""
name: colluding
seed: {SEED}
sites: {SITES}
rounds: {ROUNDS}
rounds_per_message: {ROUNDS}
audit: true
task: {{train: {{epochs: 1}}}}
route: {{kind: shards, aggregators: {AGGREGATORS}}}
"""
NAME = colluding.ATTACK.name


@pytest.fixture(scope="module")
def colluded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = up(Federation.parse(CONFIG), "simulation", tmp_path_factory.mktemp("runs"))
    assert result.status == "completed", result.reason
    return Path(result.path)


@pytest.fixture
def toy() -> Iterator[None]:
    attacks.ATTACKS.add(NAME, colluding.ATTACK)
    yield
    attacks.ATTACKS.remove(NAME)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy attack as an installed package: its metadata is on the path, and no file of ours changes."""
    package = tmp_path / "colluding-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: colluding\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(colluding.ENTRY_POINT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parent)]))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("colluders", [(), (0,), (0, 2), (2, 1, 0)])
def test_colluding_aggregators_see_the_union_of_their_shards(colluded: Path, colluders: tuple[int, ...]) -> None:
    """Without noise, they know exactly the coordinates of their masks; all of them together know the whole update."""
    observers = [f"aggregator-{k}" for k in colluders]
    found = attacks.replay(colluded, [NAME], seeds=1, observers=observers)[NAME]
    assert found["observers"] == sorted(observers or [f"aggregator-{k}" for k in range(AGGREGATORS)])
    measure = found["measures"]["coordinates"]
    assert measure["value"] == pytest.approx(len(found["observers"]) / AGGREGATORS, abs=0.05)
    assert measure["chance"] < 0.01


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_an_attack_and_each_set_of_observers_has_its_own_scores(colluded: Path) -> None:
    pair = "aggregator-0,aggregator-2"
    two = json_of(cli("attack", colluded, NAME, "--observer", pair, "--seeds", "1", "--json"))["attacks"][NAME]
    every = json_of(cli("attack", colluded, NAME, "--seeds", "1", "--json"))["attacks"][NAME]
    kept = {path.name: json.loads(path.read_text()) for path in (colluded / "attacks").glob(f"{NAME}*")}
    assert kept == {f"{NAME}.aggregator-0+aggregator-2.json": two, f"{NAME}.json": every}
    assert 0 < two["measures"]["coordinates"]["value"] < every["measures"]["coordinates"]["value"] == 1
    printed = cli(
        "attack", colluded, "--observer", pair, "--seeds", "1"
    )  # no name: every attack that can read these views
    assert printed.returncode == 0, printed.stderr
    assert "seen by" in printed.stdout
    assert "aggregator-2" in printed.stdout


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((NAME, "--observer", "aggregator-0,shuffler"), "has no view of 'shuffler'; use aggregator-0, aggregator-1, "),
        ((NAME, "--observer", "server"), "cannot use the view of server; use aggregator-0, aggregator-1, aggregator-2"),
        (("privacy-inference", "--observer", "aggregator-0"), "cannot use the view of aggregator-0; use server"),
        (("privacy-inference",), "has no updates; this attack needs a run with route server or shuffler"),
        (("metadata", "--observer", "evaluator"), "cannot use the view of evaluator; use server"),
        (("membership", "--observer", "aggregator-0"), "canaries: this run has none to guess at; record one with `can"),
        (("inversion", "--observer", "evaluator"), "inversion needs one step per round, and sites make 30; use"),
    ],
)
def test_a_missing_or_unusable_observer_is_named_with_the_fix(
    colluded: Path, words: tuple[str, ...], reason: str
) -> None:
    done = cli("attack", colluded, *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert reason in done.stderr


def test_a_run_without_a_view_that_the_attack_reads_is_refused(colluded: Path) -> None:
    class OfMixes(colluding.JoinedShards):
        observers = ("mix-*", "shuffler")

    with pytest.raises(FederationError, match="no view that joined-shards can use; use a run with a view of mix-"):
        observers_of(OfMixes(), open_run(colluded))


def test_the_example_in_the_documentation_runs(colluded: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "attacks.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    attacks.ATTACKS.add("largest-update", names["ATTACK"])
    try:
        found = attacks.replay(colluded, ["largest-update"], seeds=1)["largest-update"]
    finally:
        attacks.ATTACKS.remove("largest-update")
    assert found["measures"]["largest"]["value"] == 1  # all aggregators together have the whole updates
    assert found["measures"]["largest"]["chance"] == pytest.approx(1 / SITES)


@pytest.mark.parametrize(("name", "given", "reason"), [("odd", object(), "lacks"), ("odd", colluding.ATTACK, "itself")])
def test_a_registered_object_must_be_an_attack_of_that_name(name: str, given: Any, reason: str) -> None:
    attacks.ATTACKS.add(name, given)
    try:
        with pytest.raises(ConfigError, match=reason):
            attacks.known(name)
    finally:
        attacks.ATTACKS.remove(name)


def test_the_evaluator_records_every_model_it_had(colluded: Path) -> None:
    """Models differ by the mean of the updates, which the aggregators have in shards; the first model is public."""
    run = open_run(colluded)
    assert run.manifest["observers"]["evaluator"] == "views/evaluator"
    view = run.view("evaluator")
    assert view.rounds == list(range(ROUNDS + 1))
    models = [view.round(round).arrays["model"] for round in view.rounds]
    assert np.array_equal(models[0], Workload(Federation.parse(CONFIG)).initial)
    shards = [run.view(f"aggregator-{k}") for k in range(AGGREGATORS)]
    owners = masks.owners(models[0].size, AGGREGATORS, SEED)
    for round in range(1, ROUNDS + 1):
        assert {e.name for e in shards[0].events(round) if isinstance(e, Row)} == {f"site-{i}" for i in range(SITES)}
        means = [shard.round(round).arrays["updates"].mean(axis=0, dtype=np.float64) for shard in shards]
        step = masks.join([mean.astype(np.float32) for mean in means], owners)
        np.testing.assert_allclose(models[round] - models[round - 1], step, atol=1e-6)
    assert cli("transcript", "verify", colluded).returncode == 0
