"""IntraShuffler through the real processes: budgets, buckets, ledgers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attacks import replay
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.dp import ldp
from fl_privacy.errors import LaunchError
from fl_privacy.transcript import open_run
from fl_privacy.transcript.events import Row

EPSILONS = [0.5, 0.5, 4.5, 8, 8]
ROUNDS = 2
CONFIG = f"""
name: budgets
seed: 5
sites: {{count: 5, epsilon_total: {EPSILONS}}}
rounds: {ROUNDS}
audit: true
task: {{train: {{epochs: 1}}}}
privatise: {{kind: ldp, clip: 1.0}}
route: {{kind: shuffler, n_min: 2, buckets: published}}
combine: {{kind: fedavg, lr: 0.02, weights: precision}}
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return up(Federation.parse(CONFIG), "simulation", tmp_path_factory.mktemp("runs"))


def test_a_run_with_budgets_ends_with_a_ledger_for_every_site(published: Result) -> None:
    assert published.status == "completed", published.reason
    assert [row["site"] for row in published.ledgers] == [f"site-{i}" for i in range(5)]
    for row, epsilon in zip(published.ledgers, EPSILONS, strict=True):
        assert row["charges"] == ROUNDS
        assert 0.99 * epsilon < row["spent"] <= epsilon == row["epsilon"]
        assert (row["unit"], row["adjacency"]) == ("site", "replace")


def test_a_second_run_finds_the_totals_spent_before_anything_starts(published: Result) -> None:
    runs = Path(published.path).parent
    before = {path.name for path in runs.iterdir()}
    with pytest.raises(LaunchError, match=r"'site-0' has spent its 0\.5 in earlier runs"):
        up(Federation.parse(CONFIG), "simulation", runs)
    assert {path.name for path in runs.iterdir()} == before


def test_the_server_sees_bucket_labels_and_columns_mixed_within_each_bucket(published: Result) -> None:
    run = open_run(published.path)
    for round in run.view("server").rounds:
        seen, labels = run.view("server").round(round)
        sent, budgets = run.view("shuffler").round(round)
        assert list(labels) == ["0.5", "0.5", "4.5", "4.5", "4.5"]
        done = 0
        for group in Federation.parse(CONFIG).route.groups([str(tier) for tier in budgets]):
            rows = slice(done, done + len(group.members))
            one, two = seen["updates"][rows], sent["updates"][list(group.members)]
            assert np.array_equal(np.sort(one, axis=0), np.sort(two, axis=0))
            assert not np.array_equal(one, two)
            done += len(group.members)


def test_updates_leave_a_site_with_the_noise_of_its_budget(published: Result) -> None:
    run = open_run(published.path)
    sent, _ = run.view("shuffler").round(1)
    rows = {event.name: event.row for event in run.view("shuffler").events(1) if isinstance(event, Row)}
    for i, epsilon in enumerate(EPSILONS):
        noise = sent["updates"][rows[f"site-{i}"]] - ldp.clip(run.truth(f"site-{i}").round(1).arrays["update"], 1.0)
        expected = ldp.scale(1.0, epsilon, 1e-5, ROUNDS)
        assert noise.std() == pytest.approx(expected, rel=6 / np.sqrt(2 * noise.size))


def test_the_attack_unmixes_the_published_merge(published: Result) -> None:
    """Budgets 4.5 and 8 are merged, so the attack picks the less noisy site; the shuffler's view has the truth."""
    found = replay(Path(published.path), ["privacy-inference"], seeds=1)["privacy-inference"]["measures"]
    assert found["unmixed_fraction"]["value"] > found["unmixed_fraction"]["chance"] + 0.02
    assert found["cossim"]["groups"].keys() == {"epsilon<=1", "epsilon>4"}
