"""Settlement: what all aggregators have, or each its own; and what lost aggregators and links cost."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.relays import relayed
from fault_matrix import BY_SHARDS, arm
from fl_privacy.combine import mean
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import ConfigError
from fl_privacy.round.settlement import Failures, Intersection, Partial
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript import open_run
from fl_privacy.transcript.events import Row
from fl_privacy.wire.client import Release

ROOT = Path(__file__).parent.parent
ONE = Release("closed", count=3, members=b"\x0e", senders=b"\x0a")
OTHER = Release("closed", count=3, members=b"\x0b", senders=b"\x0f")
GONE = Release("failed", "2 of 3 updates came")


def test_aggregators_settle_on_what_all_of_them_have() -> None:
    assert Intersection().decide([ONE, ONE], 3) == [(b"\x0e", b"\x0a", "")] * 2
    assert Intersection().decide([ONE, OTHER], 2) == [(b"\x0a", b"\x0a", "")] * 2
    few = "all aggregators have 2 updates, 3 are needed"
    assert [decision.problem for decision in Intersection().decide([ONE, OTHER], 3)] == [few] * 2
    assert [decision.problem for decision in Intersection().decide([ONE, GONE], 2)] == ["2 of 3 updates came"] * 2


def test_with_partial_settlement_every_aggregator_applies_its_own() -> None:
    first, second = Partial().decide([ONE, OTHER], 3)
    assert (first.members, second.members) == (b"\x0e", b"\x0b")
    assert first.senders == second.senders == b"\x0a"
    whole, missing = Partial().decide([ONE, GONE], 3)
    assert (whole.members, whole.senders, whole.problem) == (b"\x0e", b"\0", "")  # shares of counts are worth nothing
    assert missing.problem == "2 of 3 updates came"
    assert Partial().decide([ONE, ONE], 4)[0].problem == "the aggregator has 3 updates, 4 are needed"


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(1, 10_000))
def test_failures_only_take_away_and_repeat(aggregators: float, links: float, round: int) -> None:
    failures = Failures(aggregators, links, seed=5)
    left = failures.of([ONE, OTHER, GONE], round)
    assert left == failures.of([ONE, OTHER, GONE], round)
    for before, after in zip([ONE, OTHER, GONE], left, strict=True):
        if after.phase == "closed":
            assert before.phase == "closed"
            assert not int.from_bytes(after.members, "little") & ~int.from_bytes(before.members, "little")
            assert not int.from_bytes(after.senders, "little") & ~int.from_bytes(before.senders, "little")


def test_failures_have_the_rates_that_they_state() -> None:
    """5 standard deviations of a binomial."""
    full, rounds = Release("closed", count=8, members=b"\xff", senders=b"\xff"), 700
    drawn = [Failures(0.3, 0.25, seed=1).of([full] * 3, round) for round in range(rounds)]
    assert {sum(release.phase == "failed" for release in left) for left in drawn} == {0, 1}  # 0.9 of 3 on average
    left = [release for one in drawn for release in one]
    missing = sum(release.phase == "failed" for release in left)
    assert abs(missing - 0.9 * rounds) < 5 * np.sqrt(rounds * 0.9 * 0.1)
    links = 8 * (len(left) - missing)
    lost = links - sum(int.from_bytes(r.members, "little").bit_count() for r in left if r.phase == "closed")
    assert abs(lost - 0.25 * links) < 5 * np.sqrt(links * 0.25 * 0.75)
    assert Failures(0, 0, seed=1).of([full], 1) == [replace(full)]


def test_never_all_aggregators_fail_on_purpose_and_another_attempt_loses_other_links() -> None:
    full = Release("closed", count=8, members=b"\xff", senders=b"\xff")
    failures = Failures(0.99, 0.5, seed=1)
    assert all(any(one.phase == "closed" for one in failures.of([full] * 4, round)) for round in range(100))
    assert failures.of([full] * 4, 1) != failures.of([full] * 4, 1, again=1)


@pytest.mark.parametrize(
    "route", ["{kind: shards, failures: {links: 0.5}}", "{kind: shards, failures: {links: 0.5}, settlement: partial}"]
)
def test_failures_on_purpose_need_an_audit_and_partial_settlement(route: str) -> None:
    with pytest.raises(ConfigError, match=r"route\.failures"):
        Federation.parse(f"name: a\nsites: 5\nroute: {route}")


FAILING = """
name: failing
seed: 3
sites: 5
rounds: {rounds}
quorum: 3
deadline: {deadline}
reproducible: true
audit: true
task: {{dataset: digits, model: mlp, train: {{epochs: 5, batch_size: 16, lr: 0.1, momentum: 0.9}}}}
route: {{kind: shards, aggregators: 4, n_min: 2, settlement: partial{failures}}}
compress: {{kind: dsc, p: 0.3}}
"""


@pytest.mark.e2e
def test_a_federation_learns_although_aggregators_and_links_fail(tmp_path: Path) -> None:
    config = FAILING.format(rounds=10, deadline=60, failures=", failures: {aggregators: 0.4, links: 0.1}")
    result = up(Federation.parse(config), "simulation", tmp_path)
    assert (result.status, result.rounds) == ("completed", 10)
    assert result.accuracy is not None
    assert result.accuracy > 0.85


@pytest.mark.e2e
def test_a_run_goes_on_without_an_aggregator_that_is_killed_in_the_middle_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt is repeated: the shard keeps its value for that round."""
    done = arm([BY_SHARDS["aggregator"][1]], tmp_path, monkeypatch)
    config = Federation.parse(FAILING.format(rounds=6, deadline=30, failures=""))
    result = up(config, "local", tmp_path / "runs")
    assert [file.name for file in done.glob("*.done")] == ["0.done"]
    assert (result.status, result.rounds) == ("completed", 6), result.reason
    events = [json.loads(line) for line in (Path(result.path) / "logs" / "server.log").read_text().splitlines()]
    assert not [event for event in events if event["event"] == "attempt-failed"]


@pytest.mark.e2e
def test_the_script_behind_the_committed_results_runs_at_a_reduced_size(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "failures.py"), "--quick", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["kind"], row["rate"]) for row in rows} == set(product(("aggregators", "links"), ("0.0", "0.5")))
    assert {row["round"] for row in rows} == {"0", "1", "2", "3"}
    assert {path.name for path in tmp_path.glob("*.svg")} == {"aggregators.svg", "links.svg"}


BLOCKED = """
name: blocked
seed: 3
sites: 4
rounds: 2
rounds_per_message: 2
quorum: 3
deadline: 10
reproducible: true
audit: true
task: {dataset: digits, model: mlp, train: {epochs: 1}}
route: {kind: shards, aggregators: 2, n_min: 2, settlement: partial}
"""


@pytest.mark.e2e
def test_a_shard_is_the_mean_over_the_sites_that_reach_its_aggregator(tmp_path: Path) -> None:
    """The link between a site and one aggregator is cut for good in the middle of its second upload."""
    federation = Federation.parse(BLOCKED)
    shard = 4 * layout_of(federation).size // 2
    with relayed() as relays:

        def watch(run: Path) -> None:
            link = next((link for (party, _), link in relays.links.items() if party == "site-1"), None)
            if link is not None:
                link.most = 1.5 * shard

        result = up(federation, "local", tmp_path, watch=watch)
    assert (result.status, result.rounds) == ("completed", 2), result.reason
    run = open_run(result.path)
    models = {round: run.view("evaluator").round(round).arrays["model"] for round in range(3)}
    owners = federation.route.cut(federation, models[0].size).owners  # type: ignore[attr-defined]
    missed = 0
    for round in range(1, 3):
        for index in range(2):
            view = run.view(f"aggregator-{index}")
            names = [event.name for event in view.events(round) if isinstance(event, Row)]
            updates = [run.truth(name).round(round).arrays["update"][owners == index] for name in names]
            moved = models[round - 1][owners == index] + mean.weighted(np.stack(updates), exact=True)
            assert np.array_equal(models[round][owners == index], moved)
            missed += len(names) == 3
            assert set(federation.site_names) - set(names) <= {"site-1"}
    assert missed == 1
