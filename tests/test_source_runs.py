"""Source inference on recorded runs: by name, behind a shuffler, and on means of secret groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import attacks
from attacks.common.attack import Unsuitable
from attacks.common.truth import Truth
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import ConfigError
from fl_privacy.routes.base import check_engine
from fl_privacy.routes.groups import grouped
from fl_privacy.transcript import open_run
from fl_privacy.transcript.events import Row

SITES, ROUNDS = 6, 2
CONFIG = f"""
name: source
seed: 1
sites: {SITES}
rounds: {ROUNDS}
audit: true
task: {{partition: {{kind: dirichlet, alpha: 0.1}}, train: {{epochs: 5}}}}
"""
Measures = dict[str, dict[str, Any]]


def ran(folder: Path, text: str) -> Path:
    result = up(Federation.parse(CONFIG + text), "simulation", folder)
    assert result.status == "completed", result.reason
    return Path(result.path)


def measured(run: Path, *observers: str) -> Measures:
    found: Measures = attacks.replay(run, ["source"], seeds=1, observers=observers)["source"]["measures"]
    return found


def beats_chance(one: dict[str, Any], by: float = 0.2) -> bool:
    return bool(one["value"] > one["chance"] + by)


@given(count=st.integers(2, 60), size=st.integers(2, 9), key=st.binary(min_size=32, max_size=32))
def test_every_site_is_in_one_group_of_at_least_the_asked_size(count: int, size: int, key: bytes) -> None:
    groups = grouped(count, size, key)
    assert sorted(np.concatenate(groups).tolist()) == list(range(count))
    assert min(map(len, groups)) >= min(size, count)


def test_groups_differ_by_key_and_are_uniform() -> None:
    partners = np.zeros(6, int)
    for number in range(600):
        (mine,) = [group for group in grouped(6, 2, number.to_bytes(32, "big")) if 0 in group]
        partners[mine.max()] += 1
    # Five partners, equally likely: within five standard deviations of a binomial count.
    assert abs(partners[1:] - 120).max() < 5 * np.sqrt(600 * 0.2 * 0.8)


@pytest.mark.e2e
def test_the_server_of_an_unprotected_run_knows_whose_records_are(tmp_path: Path) -> None:
    found = measured(ran(tmp_path, "route: {kind: server}\n"))
    for name in ("source_best", "rm_best", "rl_best", "rp_best", "rp_strongest"):
        assert beats_chance(found[name]), (name, found[name])
    assert found["source_best_p"]["value"] < 0.01
    assert found["rm_joint_best"]["value"] == pytest.approx(found["source_best"]["value"])


@pytest.mark.e2e
def test_a_shuffle_of_parameters_is_undone_and_the_shuffler_needs_no_such_thing(tmp_path: Path) -> None:
    run = ran(tmp_path, "route: {kind: shuffler, level: parameter}\n")
    server, shuffler = measured(run, "server"), measured(run, "shuffler")
    assert "source_best" not in server
    assert beats_chance(server["rp_strongest"])
    assert beats_chance(server["any_strongest"])
    assert beats_chance(shuffler["source_best"])


@pytest.mark.e2e
def test_the_server_gets_means_of_groups_and_the_median_of_these_is_learned(tmp_path: Path) -> None:
    run = ran(tmp_path, "route: {kind: groups, size: 2}\ncombine: {kind: median}\n")
    view = open_run(run).view("server")
    for number in view.rounds:
        assert len(view.round(number).arrays["updates"]) == SITES // 2
        assert not [event for event in view.events(number) if isinstance(event, Row)]
    found = measured(run)
    assert "source_best" not in found
    assert {"rm_best", "sums_best", "known_best"} <= found.keys()
    with pytest.raises(Unsuitable, match="route groups has none"):
        Truth(open_run(run)).round(1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("route: {kind: groups, size: 7}", "route.n_min: 7 is more than the cohort"),
        ("route: {kind: groups}\ncompress: {kind: dsc}", "encode: route groups adds up float32"),
        ("route: {kind: groups}\nhosts: {superlink: 'a:1'}", "simulation engine only"),
    ],
)
def test_what_groups_do_not_support_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Federation.parse(CONFIG + text)


def test_groups_are_refused_outside_of_simulation() -> None:
    with pytest.raises(ConfigError, match="exists in simulation only"):
        check_engine(Federation.parse(CONFIG + "route: {kind: groups}\n").route, "local")


@pytest.mark.e2e
@pytest.mark.parametrize("form", ["published", "carry-safe"])
def test_sums_of_residues_leave_source_inference_at_chance(form: str, tmp_path: Path) -> None:
    """Carry-safe sums say nothing but the sum; published ones more, which the posterior attack measures."""
    route = "route: {kind: mixes, mixes: 1, trust: trusted}\n"
    found = measured(ran(tmp_path, f"{route}encode: {{kind: rns, r: 3, form: {form}}}\n"), "server")
    assert "source_best" not in found
    strongest = found["any_strongest"]
    assert found["any_strongest_p"]["value"] > 0.001, strongest
    gain = found["rns_gain"]
    if form == "carry-safe":
        assert gain["value"] == gain["chance"]
    else:
        assert found["rns_best"]["value"] > 0
