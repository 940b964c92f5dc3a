"""`topology` and `privatise.allocation` in a config: what sites make of them and refuse, and what a plan shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from client_app.site import Site, check
from fl_privacy.cli import app
from fl_privacy.combine import mean
from fl_privacy.config import Federation
from fl_privacy.dp import fulcrum
from fl_privacy.dp.ledger import compose
from fl_privacy.errors import ConfigError, FederationError, ProtocolError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority
from fl_privacy.routes.ends import Ticket
from fl_privacy.steps.base import At
from fl_privacy.steps.privatise.allocated import own, shares
from fl_privacy.steps.privatise.dpsgd import Dpsgd
from fl_privacy.tasks.workload import Workload
from fl_privacy.theory.budget import tiers
from sites import Idle

CONFIGS = Path(__file__).parent.parent / "configs"
EXAMPLE = CONFIGS / "fulcrum.yaml"
SITES = "[{name: a, epsilon: 2}, {name: b, epsilon: 2, organisation: o}, {name: c, epsilon: 2, organisation: o}]"
CONFIG = f"""
name: allocated
sites: {SITES}
rounds: 3
task: {{train: {{epochs: 1, batch_size: 64}}}}
topology: {{kind: star, records: [200, 200, 200]}}
privatise: {{kind: dpsgd, allocation: fulcrum, budget: 0.02}}
route: {{kind: shuffler, n_min: 3}}
"""
TOPOLOGY = "topology: {kind: star, records: [200, 200, 200]}"
PRIVATISE = "{kind: dpsgd, allocation: fulcrum, budget: 0.02}"


def config(topology: str = TOPOLOGY, privatise: str = PRIVATISE, folder: Path = Path()) -> Federation:
    return Federation.parse(CONFIG.replace(TOPOLOGY, topology).replace(PRIVATISE, privatise), folder=folder)


def terms(federation: Federation) -> Dpsgd:
    assert isinstance(federation.privatise, Dpsgd)
    return federation.privatise


def noisy(fit: Any) -> np.ndarray:
    return np.full(50, fit.keywords["private"].plan.noise, np.float32)


# At the site


def test_a_site_trains_with_its_own_share_and_its_ledger_is_charged_for_exactly_that(tmp_path: Path) -> None:
    made = config()
    found = shares(terms(made), made)
    spent = {}
    for at, name in enumerate(made.site_names):
        site = Idle(made, name, tmp_path / name, records=192)
        used = float(site.prepare("run", 1, "attempt", noisy)[0])
        batch = 192 / 3
        assert used == pytest.approx(found.chosen[at] * batch)  # noise on the sum, not on the mean
        plan = own(terms(made), made, name, terms(made).plan(made, 192, 2.0))
        spent[name] = site.ledger.report()["spent"]
        assert spent[name] == pytest.approx(compose([plan.charge], 1e-5))
        assert spent[name] <= 2
    assert spent["a"] < spent["b"] == spent["c"]  # the hub of the star has the most noise


def test_the_example_learns_and_its_ledgers_say_who_pays(tmp_path: Path) -> None:
    """configs/fulcrum.yaml without processes between its sites; seeded."""
    made = Federation.parse(EXAMPLE.read_text() + "reproducible: true\n")
    work, authority, sites = Workload(made), Authority.open(tmp_path / "ca"), []
    for name in made.site_names:
        authority.issue(Identity(made.name, "site", name), tmp_path / name / "keys", ("localhost",))
        sites.append(Site(made, name, Keyring(tmp_path / name / "keys"), [], state=tmp_path / name, workload=work))
    model, shares_of = work.initial, np.full(len(sites), 1 / len(sites))
    for round in range(1, made.rounds + 1):
        updates = np.stack([site.parcel(At("run", round, f"attempt-{round}"), model).payload for site in sites])
        model = model + mean.weighted(updates, shares_of, exact=True)
    accuracy = work.evaluate(model).accuracy
    assert accuracy is not None
    assert accuracy > 0.5  # chance is 0.1
    spent = {site.config.name: site.budget()["spent"] or 0.0 for site in sites}
    assert max(spent.values()) < 8
    assert spent["east-1"] == pytest.approx(spent["west-2"], rel=0.02)  # they differ in a record
    assert spent["university"] < spent["east-1"] < spent["north"]


def test_a_site_with_fewer_records_than_others_know_keeps_its_own_epsilon(tmp_path: Path) -> None:
    """The public floor is for 256 records. Half of them are sampled twice as often, and the site adds what it takes."""
    made = config(privatise="{kind: dpsgd, allocation: fulcrum, budget: 0.0025}")
    found = shares(terms(made), made)
    demand = terms(made).plan(made, 70, 2.0)
    plan = own(terms(made), made, "b", demand)
    assert fulcrum.noise_multiplier(float(found.chosen[1]), demand.batch) < demand.noise <= plan.noise
    steps = 4 * np.log2(plan.noise / plan.batch)
    assert steps == pytest.approx(round(steps))  # on the grid: no label of 70 records
    site = Idle(made, "b", tmp_path, records=70)
    site.prepare("run", 1, "attempt", noisy)
    assert site.ledger.report()["spent"] <= 2


def test_without_a_floor_a_site_refuses_less_noise_than_its_epsilon_demands(tmp_path: Path) -> None:
    made = config(privatise="{kind: dpsgd, allocation: fulcrum, budget: 0.02, floor: false}")
    Idle(made, "b", tmp_path / "enough", records=192)
    with pytest.raises(ConfigError, match=r"'b' would get a noise multiplier of .*; set privatise.floor to true"):
        Idle(made, "b", tmp_path / "few", records=20)
    with pytest.raises(FederationError, match=r"privatise.floor: 'a' would get a noise multiplier of .*; use true"):
        config(privatise="{kind: dpsgd, allocation: fulcrum, budget: 0.0005, floor: false}")


@pytest.mark.parametrize(
    ("old", "new"), [("budget: 0.02", "budget: 0.01"), ("kind: star", "kind: line"), ("fulcrum", "uniform")]
)
def test_a_server_that_wants_less_noise_is_refused(old: str, new: str) -> None:
    """The noise follows from the config, and a ticket of another config is not accepted."""
    ours, theirs = config(), Federation.parse(CONFIG.replace(old, new))
    with pytest.raises(ProtocolError, match="for another federation config"):
        check(Ticket(run="r", federation=theirs.digest, first=1, last=1), ours)


def test_uniform_noise_is_the_same_for_all_and_needs_no_topology() -> None:
    made = config(topology="", privatise="{kind: dpsgd, allocation: uniform, budget: 0.02}")
    assert len(set(shares(terms(made), made).chosen)) == 1
    ring = config(topology="topology: {kind: ring}")
    assert len(set(shares(terms(ring), ring).chosen)) == 1


def test_no_floor_and_floor_are_equal_where_no_floor_binds() -> None:
    with_floor = config()
    without = config(privatise="{kind: dpsgd, allocation: fulcrum, budget: 0.02, floor: false}")
    first, second = (shares(terms(made), made) for made in (with_floor, without))
    assert np.allclose(first.balanced.sigma, second.balanced.sigma, rtol=1e-9)


# In the plan


def test_a_plan_shows_who_pays(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    found = json.loads(CliRunner().invoke(app, ["plan", str(path), "--json"], catch_exceptions=False).stdout)
    facts = found["steps"]["dpsgd"]
    rows = {row["site"]: row for row in facts["sites"]}
    assert facts["paper_bound"] < facts["paper_bound_uniform"]
    assert facts["window"] == 3 * 4  # 256 records in public, in batches of 64
    assert rows["a"]["epsilon_fulcrum"] < rows["a"]["epsilon_uniform"]
    assert rows["b"]["epsilon_fulcrum"] > rows["b"]["epsilon_uniform"]
    for row in rows.values():
        assert row["epsilon"] == row["epsilon_fulcrum"]
        assert row["paper_bound"] <= facts["paper_bound"]
        assert row["dataset_term"] > 100 * row["paper_bound"]
    tier = tiers(Federation.load(path))[0]
    assert tier.epsilon == 2  # the budget: no site spends more
    assert tier.scale == pytest.approx(rows["b"]["sigma"])
    text = CliRunner().invoke(app, ["plan", str(path)], catch_exceptions=False).stdout
    assert "it bounds nothing" in text
    assert "under fulcrum" in text


# Configs


def test_the_shipped_configs_use_it() -> None:
    for name in ("fulcrum", "fulcrum-heart-disease"):
        made = Federation.load(CONFIGS / f"{name}.yaml")
        found = shares(terms(made), made)
        assert found.balanced.gap > 0.1
        assert len(set(found.chosen)) > 1


def test_a_file_of_edges_travels_with_the_config(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("a b\nb c\n")
    made = config(topology="topology: {kind: file, file: edges.txt}", folder=tmp_path)
    assert made.topology is not None
    assert [made.topology.graph(made).degree(site) for site in range(3)] == [1, 2, 1]
    (tmp_path / "edges.txt").unlink()
    again = Federation.parse(made.to_yaml())
    assert again.digest == made.digest
    assert again.topology is not None
    assert again.topology.edges == "a b\nb c\n"
    (tmp_path / "edges.txt").write_text("a b\nb c\nc a\n")
    assert config(topology="topology: {kind: file, file: edges.txt}", folder=tmp_path).digest != made.digest


def test_no_exact_number_of_records_travels_with_the_config() -> None:
    made = config()
    assert made.topology is not None
    assert made.topology.records == (256, 256, 256)
    assert "200" not in made.to_yaml().partition("topology")[2].partition("privatise")[0]


@pytest.mark.parametrize(
    ("topology", "privatise", "message"),
    [
        ("", PRIVATISE, "privatise.allocation: fulcrum needs a leverage per site; add topology"),
        (TOPOLOGY, "{kind: dpsgd, allocation: fulcrum}", "privatise.budget: allocation needs the sum"),
        (TOPOLOGY, "{kind: dpsgd, budget: 0.5}", "privatise.budget: 0.5 has no effect with allocation: epsilon"),
        (TOPOLOGY, "{kind: dpsgd, window: 5}", "privatise.window: 5 has no effect with allocation: epsilon"),
        (
            TOPOLOGY,
            "{kind: dpsgd, allocation: fulcrum, budget: 0.0001}",
            "privatise.budget: 0.0001 does not allow the floors of 'a', 'b', 'c'; raise it to ",
        ),
        ("topology: {kind: star, hub: d}", PRIVATISE, "topology.hub: 'd' is no site"),
        ("topology: {kind: ring, p: 0.5}", PRIVATISE, "topology.p: ring has no such option; remove it"),
        ("topology: {kind: ring, leverage: [1, 2]}", PRIVATISE, "topology.leverage: 2 values for 3 sites"),
        ("topology: {kind: ring, leverage: [1, -2, 1]}", PRIVATISE, "topology.leverage: -2 of 'b' is not a finite"),
        ("topology: {kind: ring, records: [1, 2]}", PRIVATISE, "topology.records: 2 values for 3 sites"),
        ("topology: {kind: ring, records: [1, 0, 1]}", PRIVATISE, "topology.records"),
        ("topology: {kind: ring, leverage: {degree: 0}}", PRIVATISE, "leverage: no proxy has a weight"),
        ("topology: {kind: file}", PRIVATISE, "topology.file: kind is file, and there is none; add file: EDGES.txt"),
        ("topology: {kind: ring, edges: a b}", PRIVATISE, "topology.file: kind is ring, which has no file"),
        ("topology: {kind: file, edges: a b}", PRIVATISE, "topology.file: no edge names c; connect every site"),
        ("topology: {kind: file, file: gone.txt}", PRIVATISE, "gone.txt"),
        ("topology: {kind: hierarchical, regions: [2, 2]}", PRIVATISE, "topology.regions: (2, 2) does not divide 3"),
    ],
)
def test_bad_input_is_refused_in_one_line(topology: str, privatise: str, message: str) -> None:
    with pytest.raises(FederationError) as error:
        config(topology, privatise)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
