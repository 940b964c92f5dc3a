"""One budget for one data set: kits of several federations that spend from the same ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.config.policy import Policy, PolicyError, open_ledger
from fl_privacy.deploy import ledgers
from fl_privacy.dp import ldp
from fl_privacy.dp.ledger import LedgerError, compose
from fl_privacy.errors import ConfigError
from sites import Idle

DELTA = 1e-5


def federation(name: str, folder: Path, ledger: Path | None, kind: str = "ldp", **policy: object) -> Federation:
    """With one site of ours, whose policy is in `folder`."""
    folder.mkdir(exist_ok=True)
    terms: dict[str, object] = {"epsilon_per_round": 8, "epsilon": 8, "tasks": "[digits]", "units": "[site, record]"}
    terms |= {"ledger": ledger} if ledger else {}
    file = folder / "policy.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in (terms | policy).items()))
    own = f"{{name: ours, epsilon_total: 4, policy: {file}}}"
    others = ", ".join(f"{{name: {other}, epsilon_total: 4}}" for other in ("b", "c"))
    return Federation.parse(f"name: {name}\nrounds: 2\nsites: [{own}, {others}]\nprivatise: {{kind: {kind}}}")


def ones(private: object = None) -> np.ndarray:
    return np.ones(50, np.float32)


def never(private: object = None) -> np.ndarray:
    raise AssertionError("trained")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "ledgers" / "icu-2024"


def test_two_federations_spend_from_one_budget(shared: Path, tmp_path: Path) -> None:
    """Two rounds of a total of 4 in each are 5.98 together, and one more round in a third is too much."""
    spent = []
    for name in ("one", "two"):
        site = Idle(federation(name, tmp_path / name, shared, epsilon=6), "ours", tmp_path / name)
        for round in (1, 2):
            site.prepare("run", round, "attempt", ones)
        spent.append(site.ledger.spent())
    assert spent[0] == pytest.approx(4)
    assert 5 < spent[1] < 6
    third = Idle(federation("three", tmp_path / "three", shared, epsilon=6), "ours", tmp_path / "three")
    with pytest.raises(LedgerError, match=r"of 6 at delta 1e-05; nothing was spent or sent"):
        third.prepare("run", 1, "attempt", never)


def test_a_total_of_a_federation_counts_only_its_own_rounds(shared: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        site = Idle(federation(name, tmp_path / name, shared), "ours", tmp_path / name)
        for round in (1, 2):
            site.prepare("run", round, "attempt", ones)
        with pytest.raises(LedgerError, match="of 4 at delta"):
            site.prepare("run", 3, "attempt", never)


def test_kits_in_the_same_attempt_are_each_charged_for_it(shared: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two"), start=1):
        site = Idle(federation(name, tmp_path / name, shared), "ours", tmp_path / name)
        for _ in range(2):
            site.prepare("run", 1, "attempt", ones)
        assert site.ledger.report()["charges"] == number


def test_units_that_cannot_be_added_up_are_refused(shared: Path, tmp_path: Path) -> None:
    Idle(federation("one", tmp_path / "one", shared), "ours", tmp_path / "one").prepare("run", 1, "attempt", ones)
    with pytest.raises(LedgerError, match="cannot be added up; use another `ledger` in the policy"):
        check(federation("two", tmp_path / "two", shared, "dpsgd"), tmp_path / "two")


def test_what_a_kit_spent_before_it_shared_a_ledger_is_taken_over_once(shared: Path, tmp_path: Path) -> None:
    alone = Idle(federation("one", tmp_path / "one", None), "ours", tmp_path / "one")
    sent = alone.prepare("run", 1, "attempt", ones)
    for _ in range(2):
        site = Idle(federation("one", tmp_path / "one", shared), "ours", tmp_path / "one")
        assert site.ledger.report()["charges"] == 1
        assert np.array_equal(site.prepare("run", 1, "attempt", never), sent)
    assert site.ledger.report()["charges"] == 1


def test_a_kit_does_not_make_the_shared_ledger_again(shared: Path, tmp_path: Path) -> None:
    """Its folder may just not be mounted."""
    made = federation("one", tmp_path / "one", shared)
    open_ledger(made, "ours", tmp_path / "one").charge("a", ldp.charge(4.0, DELTA, 2))
    shared.rename(tmp_path / "away")
    for use in (lambda: open_ledger(made, "ours", tmp_path / "one"), lambda: check(made, tmp_path / "one")):
        with pytest.raises(LedgerError, match="was here and is missing"):
            use()
    assert not shared.exists()
    (tmp_path / "away").rename(shared)
    assert open_ledger(made, "ours", tmp_path / "one").spent() > 0


def check(federation: Federation, state: Path) -> None:
    ledgers.check_unit(federation, "ours", state)


def test_a_kit_notices_that_the_shared_ledger_was_set_back(shared: Path, tmp_path: Path) -> None:
    """Also if whoever did it set back the note beside it."""
    made = federation("one", tmp_path / "one", shared)
    ledger = open_ledger(made, "ours", tmp_path / "one")
    older = {file: file.read_bytes() for file in shared.iterdir()}
    ledger.charge("a", ldp.charge(4.0, DELTA, 2))
    for file, content in older.items():
        file.write_bytes(content)
    with pytest.raises(LedgerError, match=r"shared\.head has seen 1; restore the newest"):
        open_ledger(made, "ours", tmp_path / "one")


def test_a_policy_that_no_longer_names_the_ledger_is_refused(shared: Path, tmp_path: Path) -> None:
    open_ledger(federation("one", tmp_path / "one", shared), "ours", tmp_path / "one")
    with pytest.raises(PolicyError, match=r"names no ledger, but .*shared\.head says that one was used"):
        open_ledger(federation("one", tmp_path / "one", None), "ours", tmp_path / "one")
    with pytest.raises(LedgerError, match="'icu-2024' was used so far, not 'other'"):
        open_ledger(federation("one", tmp_path / "one", shared.parent / "other"), "ours", tmp_path / "one")


@pytest.mark.parametrize(("ledger", "problem"), [("relative", "absolute path"), ("/srv/Icu 2024", "name of the data")])
def test_a_ledger_has_an_absolute_path_and_a_name(ledger: str, problem: str, tmp_path: Path) -> None:
    federation("one", tmp_path / "one", Path(ledger))
    with pytest.raises(ConfigError, match=f"ledger: .*{problem}"):
        Policy.load(tmp_path / "one" / "policy.yaml")


def test_reports_of_a_shared_ledger_are_those_of_the_whole_budget(shared: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        made = federation(name, tmp_path / name, shared)
        open_ledger(made, "ours", tmp_path / name).charge("a", ldp.charge(4.0, DELTA, 2))
    (report,) = ledgers.reports(made, {"ours": tmp_path / "two"})
    assert (report["site"], report["charges"], report["epsilon"]) == ("icu-2024", 2, 8)
    one = compose([ldp.charge(4.0, DELTA, 2)], DELTA)
    assert one < report["spent"] < 2 * one
    assert report["remaining"] == pytest.approx(4 - one)  # of the federation's total
