"""A site that sends nothing: one answer at one moment, whatever the reason, which only its own log has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from client_app import moment, worker
from client_app.moment import Moment
from client_app.own_policy import OwnPolicy
from client_app.site import Site
from fl_privacy.config import Federation, approvals
from fl_privacy.deploy import confine
from fl_privacy.deploy.confine import Means
from fl_privacy.errors import ConfigError
from fl_privacy.steps.base import At
from fl_privacy.tasks.train import Diverged
from fl_privacy.wire.stream import digest
from helpers import Keys, ask_of
from sites import PARAMETERS, Events, Work

CONFIG = """
name: test
sites: [{name: site-0, epsilon: 1, policy: POLICY}, {name: site-1, epsilon: 1}, {name: site-2, epsilon: 1}]
rounds: 50
deadline: 1.6
privatise: {kind: ldp, clip: 1.0}
route: {kind: server}
"""
POLICY = "epsilon_per_round: 1\nepsilon: 99\ntasks: [digits]\nroutes: [server]\n"
USUAL = 0.7  # seconds that training takes here; less than half of the deadline
FIRST = 1.6 / 4
SLACK = 5.0  # on a busy machine
ABSTAINED = ({"status": "abstain"}, b"")


@dataclass
class Worker:
    """A site's worker without its socket, on the route that needs no other process."""

    folder: Path
    keys: Keys

    def __post_init__(self) -> None:
        policy = self.folder / "policy.yaml"
        self.federation = Federation.parse(CONFIG.replace("POLICY", str(policy)))
        self.policy(POLICY)
        self.start()

    def policy(self, text: str) -> None:
        (self.folder / "policy.yaml").write_text(text)

    def start(self) -> None:
        self.log, self.work = Events(), Work(10)
        keys, state = self.keys.of("site", "site-0"), self.folder
        self.site = Site(self.federation, "site-0", keys, [], state=state, workload=self.work, log=self.log)  # type: ignore[arg-type]

    def ask(self, round: int, run: str = "run", **changes: Any) -> tuple[Any, float]:
        """The reply to a ticket, and the seconds that it took."""
        model = np.zeros(PARAMETERS, np.float32)
        ask = ask_of(self.federation, self.keys, run, round, digest(model), self.work.layout)
        ticket = {"run": run, "federation": self.federation.digest, "first": round, "last": round}
        began = time.monotonic()
        reply = worker.answer(
            self.site, {**ticket, "terms": ask.terms.to_json(), **changes}, bytearray(model.tobytes())
        )
        return reply, time.monotonic() - began


@pytest.fixture
def site(tmp_path: Path) -> Worker:
    return Worker(tmp_path, Keys(tmp_path / "pki"))


def slow(private: Any) -> np.ndarray:
    time.sleep(USUAL)
    return np.ones(PARAMETERS, np.float32)


def out_of_memory(private: Any) -> np.ndarray:
    raise RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB")


def not_finite(private: Any) -> np.ndarray:
    return np.full(PARAMETERS, np.nan, np.float32)


def spent(site: Worker) -> None:
    site.policy(POLICY.replace("99", "1.2"))
    site.start()


def unapproved(site: Worker) -> None:
    site.policy(POLICY + "approve_runs: true\n")


def failing(train: Callable[[Any], np.ndarray]) -> Callable[[Worker], None]:
    return lambda site: setattr(site.work, "train", train)


CAUSES: dict[str, Callable[[Worker], None]] = {
    "budget: ": spent,
    "is not approved here": unapproved,
    "RuntimeError: CUDA out of memory.": failing(out_of_memory),
}


@pytest.mark.parametrize("reason", CAUSES)
def test_a_site_abstains_when_its_update_would_have_come_whatever_the_reason(site: Worker, reason: str) -> None:
    """Also right after a restart, as in one of these cases."""
    site.work.train = slow
    reply, seconds = site.ask(1)
    assert (reply[0], seconds > USUAL) == ({"status": "done"}, True)
    CAUSES[reason](site)
    reply, seconds = site.ask(2)
    assert reply == ABSTAINED
    assert USUAL <= seconds < USUAL + SLACK
    (found,) = site.log.reasons
    assert reason in found
    assert "\n" not in found


@pytest.mark.parametrize("reason", [reason for reason in CAUSES if reason != "budget: "])
def test_a_first_refusal_waits_although_nobody_knows_how_long_a_round_takes(site: Worker, reason: str) -> None:
    CAUSES[reason](site)
    reply, seconds = site.ask(1)
    assert reply == ABSTAINED
    assert FIRST <= seconds < FIRST + SLACK
    assert reason in site.log.reasons[0]


@given(deadline=st.floats(0.1, 86_400))
def test_a_first_refusal_makes_nobody_wait_for_long(deadline: float) -> None:
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment.time, "sleep", slept.append)
        Moment(None, deadline).wait(time.monotonic())
    assert 0 < slept[0] <= min(deadline / 4, 5)


@pytest.mark.parametrize("text", ["", "nan", "-1", "inf", "soon"])
def test_a_damaged_note_of_the_time_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / moment.FILE).write_text(text)
    began = time.monotonic()
    Moment(tmp_path, 0.4).wait(began)
    assert time.monotonic() - began >= 0.1


def diverged(private: Any) -> np.ndarray:
    raise Diverged("train.lr: the loss became nan")


@pytest.mark.parametrize("train", [not_finite, diverged])
def test_under_noise_it_does_not_show_whether_a_model_diverges_on_a_site_s_records(
    site: Worker, train: Callable[[Any], np.ndarray]
) -> None:
    """The server chooses the model, and could ask about records as often as it likes: an abstention has no noise."""
    site.work.train = train
    (fields, payload), _ = site.ask(1)
    assert fields == {"status": "done"}
    sent = np.frombuffer(payload, np.float32)
    assert sent.shape == (PARAMETERS,)
    assert np.isfinite(sent).all()
    assert sent.std() > 1  # noise alone
    assert len(site.log.events("charged")) == len(site.log.events("uploaded")) == 1
    assert len(site.log.events("diverged")) == 1


@pytest.mark.parametrize("train", [not_finite, diverged])
def test_without_noise_a_site_whose_training_diverges_abstains(
    tmp_path: Path, train: Callable[[Any], np.ndarray]
) -> None:
    site = Worker(tmp_path, Keys(tmp_path / "pki"))
    plain = CONFIG.replace("privatise: {kind: ldp, clip: 1.0}\n", "").replace("epsilon: 1, ", "")
    site.federation = Federation.parse(
        plain.replace(", epsilon: 1}", "}").replace("POLICY", str(tmp_path / "policy.yaml"))
    )
    site.policy(POLICY + "allow_plain: true\n")
    site.start()
    site.work.train = train
    assert site.ask(1)[0] == ABSTAINED
    assert not site.log.events("uploaded", "charged")
    assert "not finite" in site.log.reasons[0] or "nan" in site.log.reasons[0]


def test_only_where_models_come_with_a_ticket_may_one_bring_any_bytes(site: Worker, tmp_path: Path) -> None:
    """Code that comes with a run could hold 64 models of memory in the worker otherwise."""
    assert site.site.largest_model == 4 * PARAMETERS
    (tmp_path / "b").mkdir()
    policy = tmp_path / "b" / "policy.yaml"
    policy.write_text(POLICY.replace("routes: [server]\n", ""))
    federation = Federation.parse(CONFIG.replace("POLICY", str(policy)).replace("kind: server", "kind: shuffler"))
    keys: Any = site.keys.of("site", "site-0")
    place: Any = {"state": tmp_path / "b", "workload": Work(10), "log": Events()}
    assert Site(federation, "site-0", keys, ["127.0.0.1:1"], **place).largest_model == 0


def test_code_that_fails_costs_a_round_and_not_the_worker(site: Worker) -> None:
    site.work.train = out_of_memory
    assert site.ask(1)[0] == ABSTAINED
    site.work.train = lambda private: np.ones(PARAMETERS, np.float32)
    assert site.ask(2)[0][0] == {"status": "done"}
    assert len(site.log.events("uploaded")) == 1


def test_a_run_is_taken_part_in_only_once_it_is_approved(site: Worker) -> None:
    """Every round is answered, and the approval counts from the next one on."""
    unapproved(site)
    assert [site.ask(round)[0] for round in (1, 2)] == [ABSTAINED] * 2
    assert not site.log.events("uploaded", "charged")
    approvals.approve("run", site.federation, site.folder)
    assert site.ask(3)[0][0] == {"status": "done"}
    assert site.ask(4, run="another")[0] == ABSTAINED
    assert len(site.log.events("uploaded")) == 1


# The policy is read again before every round

CHANGES = {
    "tasks: [mnist]": "task 'digits' is not allowed here",
    "routes: [shuffler]": "route 'server' is not allowed here",
    "units: [record]": "ldp protects a site",
    "epsilon_per_round: 0.5": "more than the 0.5 allowed here",
    "epsilon: 1.2": "would raise epsilon to",
    "min_cohort: 4": "fewer than the 4 organisations",
    "delta: 1.0e-9": "epsilon 1.",
    "approve_runs: true": "is not approved here",
    "confinement: required": "code of a run could read keys and data",
    "epsilon: much": "epsilon",
    "nothing: 1": "nothing",
    "{": "cannot be read",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_binds_a_running_worker(site: Worker, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next round on, until the file is changed again."""
    monkeypatch.setattr(confine, "means", Means)
    assert site.ask(1)[0][0] == {"status": "done"}
    key = change.partition(":")[0]
    kept = [line for line in POLICY.splitlines() if line.partition(":")[0] != key]
    site.policy("\n".join([*kept, change]))
    assert [site.ask(round)[0] for round in (2, 3)] == [ABSTAINED] * 2
    assert all(CHANGES[change] in reason for reason in site.log.reasons)
    site.policy(POLICY)
    assert site.ask(4)[0][0] == {"status": "done"}
    assert len(site.log.events("charged")) == 2


def test_a_policy_that_is_gone_allows_nothing(site: Worker) -> None:
    (site.folder / "policy.yaml").unlink()
    assert site.ask(1)[0] == ABSTAINED
    assert "nothing is sent without it" in site.log.reasons[0]
    assert not site.log.events("charged", "uploaded")


def test_the_log_says_which_policy_each_update_left_under(site: Worker) -> None:
    site.ask(1)
    site.policy(POLICY + "min_cohort: 2\n")
    site.ask(2)
    digests = [event["sha256"] for event in site.log.events("policy")]
    assert [event["policy"] for event in site.log.events("uploaded")] == digests
    assert len(set(digests)) == 2


def test_code_that_a_policy_no_longer_lists_is_not_run(tmp_path: Path) -> None:
    """The site of a task of its own, whose operator allowed the code by its digest."""
    (tmp_path / "task.py").write_text("class Own: ...\n")
    policy = tmp_path / "policy.yaml"
    text = CONFIG.replace("POLICY", str(policy)) + "task: {code: task.py}\n"
    made = Federation.parse(text, folder=tmp_path)
    terms = POLICY.replace("digits", made.task.label) + "allow_plain_counts: true\n"
    policy.write_text(f"{terms}code: [{made.task.sha256}]\n")
    own = OwnPolicy(made, "site-0", tmp_path, Events())
    policy.write_text(terms)
    with pytest.raises(ConfigError, match="is not accepted at this site"):
        own.check(At("run", 1, "a"), lambda policy: None)
