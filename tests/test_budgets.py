"""Total budgets: the noise that spends them over the planned rounds, what enforces them, and what shows them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from fl_privacy.cli import app
from fl_privacy.combine import weights
from fl_privacy.config import Federation
from fl_privacy.config.evaluate import charge_of
from fl_privacy.config.policy import PolicyError, open_ledger
from fl_privacy.deploy import ledgers
from fl_privacy.dp import gaussian, ldp, sampled
from fl_privacy.dp.ledger import Charge, Ledger, LedgerError, Limit, compose
from fl_privacy.errors import ConfigError, LaunchError
from fl_privacy.tasks.workload import Workload
from fl_privacy.theory.budget import tiers
from profiles import examples
from sites import Idle

OWN = """
import torch
from fl_privacy import Task

class Own(Task):
    preprocessing = "public"

    def model(self):
        return torch.nn.Linear(4, 2)
"""
DELTA = 1e-5
ROUNDS = 4
TASK = "task: {train: {epochs: 2, batch_size: 64}}"


def federation(kind: str, sites: str = "{count: 3, epsilon_total: 8}", more: str = "") -> Federation:
    parts = (f"rounds: {ROUNDS}", f"sites: {sites}", TASK, f"privatise: {{kind: {kind}}}", more)
    return Federation.parse("\n".join(parts))


def with_policy(kind: str, folder: Path, **terms: object) -> Federation:
    """A federation whose first site has a policy of its own."""
    fields = {"epsilon_per_round": 8, "epsilon": 8, "tasks": "[digits]", "units": "[site, record]", **terms}
    path = folder / "policy.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in fields.items()))
    others = ", ".join(f"{{name: site-{i}, epsilon_total: 8}}" for i in (1, 2))
    return federation(kind, f"[{{name: site-0, epsilon_total: 8, policy: {path}}}, {others}]")


def ones(fit: Any = None) -> np.ndarray:
    return np.ones(50, np.float32)


def never(fit: Any = None) -> np.ndarray:
    raise AssertionError("trained")


def test_totals_are_given_to_all_sites_in_turn_or_one_by_one() -> None:
    dealt = federation("ldp", "{count: 5, epsilon_total: [2, 8]}")
    assert [site.epsilon_total for site in dealt.sites] == [2, 8, 2, 8, 2]
    assert [site.tier for site in dealt.sites] == ["2", "8", "2", "8", "2"]
    listed = federation("ldp", "[{name: site-0, epsilon_total: 2}, {name: site-1, epsilon_total: 8}, " + REST)
    assert [site.budget for site in listed.sites] == [2, 8, 1]
    assert (dealt.budget_rounds, federation("ldp", "{count: 3, epsilon: 1}").budget_rounds) == (ROUNDS, 1)
    assert Federation.parse(dealt.to_yaml()) == dealt


REST = "{name: site-2, epsilon_total: 1}]"
BAD = {
    "{count: 3, epsilon: 1, epsilon_total: 8}": "'site-0' has one per round, and it has both",
    "[{name: a, epsilon_total: 8, epsilon: 1}, {name: b, epsilon_total: 8}, " + REST: "'a' .* it has both",
    "[{name: a, epsilon: 1}, {name: b, epsilon: 1}, " + REST: "'a' has one per round, and 'site-2' has epsilon_total",
    "[{name: a}, {name: b, epsilon_total: 1}, " + REST: "'a' has no budget",
    "{count: 3, epsilon_total: 0}": r"sites\.0\.epsilon_total",
    "{count: 3, epsilon_total: [8, .nan]}": r"sites\.1\.epsilon_total",
    "{count: 3, epsilon_total: 1000}": r"sites\.0\.epsilon_total",
    "{count: 3, epsilon_total: []}": r"sites\.0\.epsilon_total",
}


@pytest.mark.parametrize("sites", BAD)
def test_budgets_in_two_forms_and_numbers_that_are_none_are_refused(sites: str) -> None:
    with pytest.raises(ConfigError, match=BAD[sites]):
        federation("ldp", sites)


def test_a_total_without_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sites\.epsilon_total: 'site-0' has 8, and privatise\.kind is none"):
        federation("none")


def test_sites_agree_on_totals_and_rounds() -> None:
    """Both decide the noise, so both are in the digest."""
    made = {federation("ldp", f"{{count: 3, {budget}}}").digest for budget in ("epsilon: 8", "epsilon_total: 8")}
    more = federation("ldp").model_copy(update={"rounds": ROUNDS + 1})
    assert len({*made, federation("ldp", "{count: 3, epsilon_total: 9}").digest, more.digest}) == 4


@given(total=st.floats(0.01, 999), delta=st.floats(1e-12, 0.01), rounds=st.one_of(st.integers(1, 20), st.just(100_000)))
def test_planned_rounds_of_whole_updates_spend_exactly_the_total(total: float, delta: float, rounds: int) -> None:
    spent = compose([ldp.charge(total, delta, rounds)] * rounds, delta)
    assert total * (1 - 1e-6) < spent <= total


@examples(5)
@given(total=st.sampled_from((0.5, 2.0, 8.0)), rounds=st.integers(1, 200), per_epoch=st.integers(2, 40))
def test_planned_rounds_of_sampled_steps_spend_the_total(total: float, rounds: int, per_epoch: int) -> None:
    plan = sampled.plan(per_epoch * 64, 2, 64, 1.0, total, DELTA, rounds)
    assert 0.99 * total < compose([plan.charge] * rounds, DELTA) <= total


def test_noise_of_a_total_is_that_of_opacus() -> None:
    """What make_private_with_epsilon does: one noise multiplier for all steps of all rounds."""
    from opacus.accountants import PRVAccountant

    plan = sampled.plan(9 * 32, 2, 32, 1.0, 4.0, DELTA, 10)
    accountant = PRVAccountant()
    accountant.history = [(plan.noise, plan.rate, plan.steps * 10)]
    assert accountant.get_epsilon(DELTA, eps_error=0.01) == pytest.approx(4.0, rel=0.01)


# Sites of 288 records sample; one of 60 fits in a batch, so each of its steps takes all records.
@pytest.mark.parametrize(("kind", "records"), [("ldp", 288), ("dpsgd", 288), ("dpsgd", 60)])
def test_a_site_spends_its_total_over_the_planned_rounds_and_then_stops(
    kind: str, records: int, tmp_path: Path
) -> None:
    site = Idle(federation(kind), "site-0", tmp_path, records)
    for round in range(1, ROUNDS + 1):
        site.prepare("run", round, "attempt", ones)
    report = site.ledger.report()
    assert 0.99 * 8 < report["spent"] <= 8
    assert (report["epsilon"], report["delta"], report["charges"]) == (8, DELTA, ROUNDS)
    assert report["remaining"] == pytest.approx(8 - report["spent"])
    for again in (site, Idle(federation(kind), "site-0", tmp_path, records)):
        with pytest.raises(LedgerError, match="of 8 at delta 1e-05; nothing was spent or sent"):
            again.prepare("another-run", 1, "attempt", never)


def test_a_retried_round_is_paid_for_by_the_last_one(tmp_path: Path) -> None:
    site = Idle(federation("ldp"), "site-0", tmp_path)
    site.prepare("run", 1, "first", ones)
    for round in range(1, ROUNDS):
        site.prepare("run", round, "second", ones)
    with pytest.raises(LedgerError, match="nothing was spent"):
        site.prepare("run", ROUNDS, "first", never)
    assert site.ledger.spent() <= 8


def test_a_site_with_more_records_has_the_same_label_and_its_own_noise(tmp_path: Path) -> None:
    """The epsilon of a round depends on the number of records, which must not be visible in the label."""
    made = federation("dpsgd")
    sites = {n: Idle(made, f"site-{i}", tmp_path / str(n), n).site for i, n in enumerate((288, 1000))}
    assert {site.config.tier for site in sites.values()} == {"8"}
    small, large = (site.budget()["epsilon"] for site in sites.values())
    assert small is not None
    assert large is not None
    assert 2 < small < 8 > large > 2
    assert small != large


def test_levelled_buckets_and_precision_weights_know_the_noise_of_a_total() -> None:
    more = "route: {kind: shuffler, buckets: levelled}\ncombine: {kind: fedavg, weights: precision}"
    made = federation("ldp", "{count: 4, epsilon_total: [2, 8]}", more)
    labels = ["2", "8"]
    noise = [made.privatise.noise(made, float(label)) for label in labels]
    assert noise == pytest.approx([2 * gaussian.sigma(e, DELTA) * math.sqrt(ROUNDS) for e in (2, 8)])
    lack = made.route.missing(made, labels)  # type: ignore[attr-defined]
    assert [math.hypot(own, top) for own, top in zip(noise, lack, strict=True)] == pytest.approx([noise[0]] * 2)
    shares = weights.RULES["precision"]([float(label) for label in labels], DELTA)
    assert shares[1] / shares[0] == pytest.approx((noise[0] / noise[1]) ** 2)


@pytest.mark.parametrize("kind", ["ldp", "dpsgd"])
def test_a_policy_limits_the_total_and_what_a_round_takes_of_it(kind: str, tmp_path: Path) -> None:
    (tier,) = tiers(with_policy(kind, tmp_path))
    with pytest.raises(PolicyError, match=r"epsilon_total 8 is more than the 7\.9 allowed here over all runs"):
        Idle(with_policy(kind, tmp_path, epsilon=7.9), "site-0", tmp_path)
    with pytest.raises(PolicyError, match="per round at delta 1e-05 is more than the 3 allowed here"):
        Idle(with_policy(kind, tmp_path, epsilon_per_round=3), "site-0", tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()
    assert 3 < tier.epsilon < 5
    Idle(with_policy(kind, tmp_path, epsilon_per_round=5), "site-0", tmp_path)


def test_a_policy_judges_a_round_at_its_own_delta(tmp_path: Path) -> None:
    """The federation could choose a delta at which any noise looks like a small epsilon."""
    made = with_policy("ldp", tmp_path, epsilon_per_round=4, delta=1e-9)
    with pytest.raises(PolicyError, match=r"epsilon 5\.051 per round at delta 1e-09 is more than the 4 allowed"):
        Idle(made, "site-0", tmp_path)
    Idle(with_policy("ldp", tmp_path, epsilon_per_round=4), "site-0", tmp_path)


def test_a_ledger_keeps_the_policy_and_the_total_each_at_its_delta(tmp_path: Path) -> None:
    tight = open_ledger(with_policy("ldp", tmp_path, epsilon=20), "site-0", tmp_path)
    assert (tight.epsilon, tight.delta) == (8, DELTA)
    charge = ldp.charge(8.0, DELTA, ROUNDS)
    ledger = open_ledger(with_policy("ldp", tmp_path, epsilon=10, delta=1e-9), "site-0", tmp_path)
    for round in range(ROUNDS - 1):  # all four are 8 at the federation's delta, and 11 at the policy's
        ledger.charge(f"round-{round}", charge)
    with pytest.raises(LedgerError, match="of 10 at delta 1e-09"):
        ledger.charge("last", charge)
    assert ledger.remaining() == min(10 - ledger.spent(1e-9), 8 - ledger.spent(DELTA))
    with pytest.raises(LedgerError, match=r"of 2 at delta 0\.001"):
        Ledger(tmp_path / "other", 8.0, DELTA, "", [Limit(2.0, 1e-3)]).charge("a", Charge(0.8, "site", "replace"))


def test_a_new_run_with_spent_totals_does_not_start(tmp_path: Path) -> None:
    made = federation("ldp", more="quorum: 2\nroute: {kind: shuffler, n_min: 2}")
    ledgers.check(made, tmp_path)
    assert not list(tmp_path.iterdir())
    for name in ("site-0", "site-1"):
        for round in range(ROUNDS):
            ledgers.check(made, tmp_path)
            open_ledger(made, name, tmp_path / name).charge(str(round), ldp.charge(8.0, DELTA, ROUNDS))
    with pytest.raises(LaunchError, match=r"'site-1' has spent its 8 in earlier runs .* needs 2 sites; raise"):
        ledgers.check(made, tmp_path)
    ledgers.check(federation("ldp", "{count: 3, epsilon: 8}"), tmp_path)


@pytest.mark.parametrize(("kind", "terms"), [("ldp", "site, adjacency: replace"), ("dpsgd", "record, adjacency: add")])
def test_a_plan_shows_both_forms_with_unit_adjacency_and_delta(kind: str, terms: str, tmp_path: Path) -> None:
    config = tmp_path / "federation.yaml"
    for budget, other in (("epsilon", "composed"), ("epsilon_total", "epsilon")):
        made = federation(kind, f"{{count: 5, {budget}: [2, 8]}}", "cohort: 3")
        config.write_text(made.to_yaml())
        found = json.loads(CliRunner().invoke(app, ["plan", str(config), "--json"]).stdout)["budgets"]
        given = "epsilon" if other == "composed" else "composed"
        assert [(b["tier"], b[given], b["sites"]) for b in found] == [("2", 2, 3), ("8", 8, 2)]
        assert all(b["epsilon"] < b["composed"] for b in found)
        text = " ".join(CliRunner().invoke(app, ["plan", str(config)]).stdout.split())
        for b in found:
            assert f"epsilon {b['epsilon']:.4g} per round, {b['composed']:.4g} after all {ROUNDS} rounds" in text
        assert f"(unit: {terms}" in text
        assert "delta: 1e-05" in text
        assert "a round draws 3 of 5 sites; budgets count all rounds" in text
    assert found[1]["epsilon"] == pytest.approx(found[0]["epsilon"] * 4, rel=0.3)


def test_an_operator_sees_what_a_run_would_spend_on_the_site_s_own_records(tmp_path: Path) -> None:
    """With evaluations: of the models before rounds 1 and 3, and of the last one."""
    config = Federation.parse(
        "rounds: 4\nsites: {count: 3, epsilon: 2}\nprivatise: {kind: dpsgd}\n"
        "evaluate: {by: sites, every: 2, epsilon: 0.5}\n"
        "task: {partition: {kind: dirichlet, alpha: 0.3}, train: {epochs: 1, batch_size: 64}}"
    )
    work, evaluation = Workload(config, None), charge_of(config)
    assert evaluation is not None
    said = []
    for site in config.site_names:
        plan = sampled.plan(len(work.site_data(site)), 1, 64, 1.0, 2, DELTA, 1)
        spends = compose([plan.charge] * 4 + [evaluation] * 3, DELTA)
        said.append(ledgers.projected(config, site, tmp_path / site, None)[1])
        assert said[-1] == f"this run: at most epsilon {spends:.4g} in 4 rounds, without retries"
    assert len(set(said)) > 1


@pytest.mark.parametrize(
    ("given", "shown"), [("", "1,000 records per site, assumed: set"), ("56", "56 records per site)")]
)
def test_a_plan_says_for_how_many_records_its_budgets_hold(tmp_path: Path, given: str, shown: str) -> None:
    stated = f"records: {given}, " if given else ""
    (tmp_path / "task.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text(
        "sites: {count: 3, epsilon: 2}\nprivatise: {kind: dpsgd}\n"
        f"task: {{code: task.py, {stated}train: {{epochs: 1, batch_size: 16}}}}\n"
    )
    said = CliRunner().invoke(app, ["plan", str(tmp_path / "c.yaml")])
    assert not said.exception
    assert shown in " ".join(said.output.split())
