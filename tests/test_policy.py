"""A site's own policy: it is a file of its own, nothing leaves a site without it, and no config talks it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client_app.own_policy import OwnPolicy
from commands import cli, json_of
from fl_privacy.config import Federation, approvals
from fl_privacy.config.evaluate import charge_of
from fl_privacy.config.policy import USED, Policy, PolicyError, policy_file, template
from fl_privacy.errors import ConfigError
from sites import Events

CONFIG = """
name: hospitals
sites: [{name: a, epsilon: 1}, {name: b, epsilon: 1}, {name: c, epsilon: 2}]
rounds: 4
privatise: {kind: ldp, clip: 1.0}
"""
TEXT = "epsilon_per_round: 2\nepsilon: 9\ntasks: [digits]\n"


def federation(policy: Path | None = None, text: str = CONFIG) -> Federation:
    made = Federation.parse(text)
    sites = tuple(site.model_copy(update={"policy": policy}) for site in made.sites)
    return made.model_copy(update={"sites": sites})


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "policy.yaml"
    path.write_text(TEXT + "".join(f"{key}: {value}\n" for key, value in changes.items()))
    return path


def test_a_site_without_a_policy_does_not_start_except_in_a_trial(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing leaves a site without it"):
        policy_file(federation(), "a", tmp_path, trial=False)
    assert policy_file(federation(), "a", tmp_path, trial=True) is None


def test_a_site_that_once_had_a_policy_never_starts_without_one(tmp_path: Path) -> None:
    """A new kit.yaml, or one that says `trial`, does not talk a site out of its policy."""
    path = written(tmp_path)
    assert policy_file(federation(path), "a", tmp_path, trial=True) == path
    assert (tmp_path / USED).exists()
    with pytest.raises(ConfigError, match="has none"):
        policy_file(federation(), "a", tmp_path, trial=True)


@pytest.mark.parametrize(
    ("changes", "text", "problem"),
    [
        ({}, CONFIG.replace("privatise", "#"), "must be privatised"),
        ({}, CONFIG + "reproducible: true\n", "not private"),
        ({}, CONFIG + "evaluate: sites\n", "counts of held-out records"),
        ({"min_cohort": 4}, CONFIG, "fewer than the 4 organisations"),
        ({}, CONFIG.replace("name: b,", "name: b, organisation: a,"), "fewer than the 3 organisations"),
    ],
)
def test_what_a_policy_does_not_allow_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str, problem: str
) -> None:
    text = text.replace(", epsilon: 1", "").replace(", epsilon: 2", "") if "#" in text else text
    policy = Policy.load(written(tmp_path, **changes))
    with pytest.raises(PolicyError, match=problem):
        policy.check(Federation.parse(text), "a")


def test_the_floor_of_a_submission_is_the_policy_s_if_that_is_higher(tmp_path: Path) -> None:
    five = federation(text=CONFIG.replace("sites: [", "sites: [{name: d, epsilon: 1}, {name: e, epsilon: 1}, "))
    for least, floor in ((None, 3), (5, 5), (1, 3)):
        policy = None if least is None else written(tmp_path, min_cohort=least)
        sites = tuple(site.model_copy(update={"policy": policy}) for site in five.sites)
        assert OwnPolicy(five.model_copy(update={"sites": sites}), "a", tmp_path, Events()).floor() == floor


@pytest.mark.parametrize(
    ("evaluate", "each", "plain_counts"),
    [("server", 2, False), ("sites", 2, True), ("{by: sites, epsilon: 1}", 3, False)],
)
def test_the_template_allows_its_federation_and_no_less_noise(
    tmp_path: Path, evaluate: str, each: int, plain_counts: bool
) -> None:
    path, made = tmp_path / "policy.yaml", federation(text=f"{CONFIG}evaluate: {evaluate}\n")
    path.write_text(template(made, "c"))
    policy, budget = Policy.load(path), made.site("c").budget
    assert budget is not None
    policy.check(made, "c")
    policy.check_charge(*filter(None, (made.privatise.charge(made, budget), charge_of(made))))
    assert (policy.epsilon_per_round, policy.epsilon, policy.allow_plain) == (each, 4 * each, False)
    assert policy.allow_plain_counts == plain_counts


class TestApproval:
    def test_only_an_approved_run_under_the_same_config_is_taken_part_in(self, tmp_path: Path) -> None:
        policy = written(tmp_path, approve_runs="true")
        config = federation(policy)
        state = tmp_path / "state"
        with pytest.raises(PolicyError, match="run-1 is not approved here"):
            approvals.check("run-1", config, state)
        approvals.approve("run-1", config, state)
        approvals.check("run-1", config, state)
        with pytest.raises(PolicyError, match="run-2"):
            approvals.check("run-2", config, state)
        other = federation(policy, CONFIG.replace("rounds: 4", "rounds: 5"))
        with pytest.raises(PolicyError, match="run-1"):
            approvals.check("run-1", other, state)
        assert "+rounds: 5" in approvals.changes(other, state)

    def test_a_site_that_cannot_keep_approvals_does_not_start(self, tmp_path: Path) -> None:
        config = federation(written(tmp_path, approve_runs="true"))
        with pytest.raises(PolicyError, match="approve_runs needs a folder in which approvals are kept; set --state"):
            OwnPolicy(config, "a", None, Events())

    @pytest.mark.parametrize("run", ["", "../x", "last.yaml", "a b", "x" * 200])
    def test_a_name_that_is_none_is_refused(self, tmp_path: Path, run: str) -> None:
        with pytest.raises(ConfigError, match="not the name of a run"):
            approvals.approve(run, federation(), tmp_path)


def test_the_operator_sees_what_a_run_costs_before_approving_it(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG + "hosts: {superlink: 's:1', shuffler: 'm:1'}\n")
    cli("pki", "init", "--pki", str(tmp_path / "pki"), "--federation", "hospitals")
    cli("provision", str(config), "--out", str(tmp_path / "kits"), "--pki", str(tmp_path / "pki"), "--sign")
    kit = str(tmp_path / "kits" / "c")
    found = json_of(cli("site", "approve", kit, "run-7", "--yes", "--json"))
    assert found["approved"]
    assert "this run: at most epsilon" in found["budget"][1]
    assert "min_cohort: 3" in cli("site", "policy", kit).stdout


@pytest.mark.parametrize(
    ("quorum", "missed"), [(2, "completes rounds of 2, in which this site sends nothing"), (3, "")]
)
def test_a_draft_says_in_which_rounds_the_site_sends_nothing(quorum: int, missed: str) -> None:
    config = federation(text=CONFIG + f"quorum: {quorum}\nroute: {{kind: shuffler, n_min: 2}}\n")
    assert ("sends nothing" in template(config, "a"), missed in template(config, "a")) == (bool(missed), True)
