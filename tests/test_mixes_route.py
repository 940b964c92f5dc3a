"""Route mixes: what its config demands, which mixes take part, what it costs and whom it trusts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fl_privacy.config import Federation
from fl_privacy.config.policy import Policy, PolicyError
from fl_privacy.errors import ConfigError

BASE: dict[str, Any] = {"name": "test", "sites": 5, "encode": {"kind": "rns"}, "route": {"kind": "mixes"}}


def federation(route: dict[str, Any] | None = None, **changes: Any) -> Federation:
    values = {**BASE, **changes, "route": {**BASE["route"], **(route or {})}}
    return Federation.parse(yaml.safe_dump(values))


@pytest.mark.parametrize(
    ("route", "changes", "problem"),
    [
        ({}, {"encode": {"kind": "none"}}, "encode.kind: none gives no integers"),
        ({}, {"encode": {"kind": "rns", "form": "published"}}, "encode.form: published"),
        ({"mixes": 1}, {}, "route.trust: semi-honest, and one mix sees every update"),
        ({"trust": "trusted"}, {}, "route.trust: trusted, and 3 mixes get shares"),
        ({"mixes_needed": 4}, {}, "route.mixes_needed: 4 of 3 mixes"),
        ({"mixes_needed": 1}, {}, "route.mixes_needed: 1 of 3 mixes"),
        ({"mixes_needed": 2}, {"quorum": 4}, "quorum: with route.mixes_needed 2 of 3"),
        ({}, {"combine": {"kind": "median"}}, "needs single updates"),
        ({"trust": "malicious"}, {"sites": 579}, "up to 578 sites with 3 mixes"),
        ({}, {"sites": [{"name": name} for name in ("mix-0", "b", "c")]}, "'mix-0' is the name of a mix"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_fix(route: Any, changes: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        federation(route, **changes)


def test_a_config_reads_back_from_its_own_yaml() -> None:
    made = federation({"trust": "malicious", "mixes": 4, "mixes_needed": 3})
    assert Federation.parse(made.to_yaml()).digest == made.digest


def test_the_first_attempt_has_all_mixes_and_later_ones_every_set_that_is_allowed() -> None:
    route: Any = federation({"mixes": 4, "mixes_needed": 3}).route
    found = [route.taking_part(number) for number in range(1, 7)]
    assert found == [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert route.next_number(1, {0, 2, 3}) == 4
    assert route.next_number(4, {0, 1}) == 0
    assert route.taking_part(4, farewell=3) == (0, 1, 2, 3)
    alone: Any = federation().route
    assert [alone.taking_part(number) for number in (1, 2)] == [(0, 1, 2)] * 2


def test_the_mixes_take_turns_at_getting_data() -> None:
    route: Any = federation().route
    assert sorted(route.data_mix(1, round) for round in (1, 2, 3)) == [0, 1, 2]


def test_the_promise_is_that_of_the_fewest_mixes_a_retry_may_use() -> None:
    promised = [str(one) for one in federation().route.trust(federation())]
    assert promised == ["mix-0, mix-1, mix-2 together can see every update and who sent it"]
    fewer = federation({"mixes_needed": 2})
    assert [one.parties for one in fewer.route.trust(fewer)] == [
        ("mix-0", "mix-1"),
        ("mix-0", "mix-2"),
        ("mix-1", "mix-2"),
    ]


def test_a_site_uploads_hardly_more_than_its_update() -> None:
    made = federation(encode={"kind": "fixed", "bits": 32})
    (_, _, site) = made.route.cost(made, 100_000)
    assert made.coding.nbytes(100_000) <= site.updates[1] <= 1.05 * made.coding.nbytes(100_000)


@pytest.mark.parametrize("route", [{}, {"trust": "malicious"}, {"mixes": 1, "trust": "trusted"}])
def test_plan_states_the_cpu_time_of_sums(route: dict[str, Any]) -> None:
    made: Any = federation(route)
    small, large = (made.route.foretell(made, parameters).facts for parameters in (1000, 1_000_000))
    assert 0 < small["seconds_per_mix"] < large["seconds_per_mix"] < 60
    assert (large["seconds_per_site"] > 0) == (made.route.mixes > 1)


def test_a_policy_refuses_too_few_mixes() -> None:
    values = {"epsilon_per_round": 1, "epsilon": 1, "tasks": ["digits"], "routes": ["mixes"], "allow_plain": True}
    policy = Policy.model_validate({**values, "min_mixes": 3})
    policy.check(federation(), "site-0")
    with pytest.raises(PolicyError, match="2 of the mixes could put an update together"):
        policy.check(federation({"mixes_needed": 2}), "site-0")
