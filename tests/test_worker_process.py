"""A site's worker as a real process: nobody talks it out of its policy, and nobody sets its ledger back unnoticed."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app import pipe
from fl_privacy.config import Federation, approvals
from fl_privacy.deploy.commands import Ports, processes
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.deploy.kits.serve import prepare
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import ConfigError
from fl_privacy.identity import accepted
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import Authority
from fl_privacy.ops.tail import Tail
from fl_privacy.tasks.workload import layout_of
from fl_privacy.wire import federation_pb2 as pb
from helpers import CALL, START, Deployment, Keys, collect, deploy, open_round, round_header, submit
from kits import change, federation, signed_site

pytestmark = pytest.mark.e2e

POLICY = "epsilon_per_round: 1\nepsilon: 2\ntasks: [digits]\nallow_plain: true\n"


def events(fleet: Fleet, event: str) -> list[dict[str, Any]]:
    return [found for found in Tail(fleet.children["worker"].log).poll() if found["event"] == event]


# The policy (row e of what a hostile review found)


@dataclass
class Kit:
    """A site's kit, whose worker starts as `fl-privacy serve` starts it."""

    folder: Path
    fleet: Fleet

    def start(self) -> None:
        kit = Folder.open(self.folder)
        kit.run.mkdir(exist_ok=True, mode=0o700)
        prepare(kit)
        worker = next(one for one in processes(kit.place, Ports.free()) if one.name == "worker")
        self.fleet.start("worker", worker.command)

    def policy(self) -> dict[str, Any]:
        """Start it; the policy that it goes by."""
        self.start()
        found = self.fleet.wait_for("worker", "policy", START)
        self.fleet.stop("worker")
        return found

    def refusal(self) -> str:
        """Start it; why it does not."""
        self.start()
        assert self.fleet.children["worker"].process.wait(START) == 2
        reason = str(events(self.fleet, "error")[0]["reason"])
        self.fleet.stop("worker")
        return reason


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    """As it arrives on a machine: without a policy, which is the site's own."""
    folder = signed_site(tmp_path, Authority.open(tmp_path / "ca"))
    (folder / "policy.yaml").unlink()
    made = Kit(folder, Fleet(tmp_path / "logs", tmp_path / "pids"))
    yield made
    made.fleet.stop()


def send_new_kit(kit: Kit, folder: Path, **changes: Any) -> None:
    """What "use the new kit.yaml" does to a site: files of another provisioning take the place of its own."""
    authority = Authority.open(folder / "ca")
    provision(federation(**changes), folder / "again", authority, sign=True, choices=Choices(metrics=None))
    for name in ("kit.yaml", "federation.yaml"):
        shutil.copy(folder / "again" / "site-0" / name, kit.folder / name)


def test_a_worker_without_a_policy_does_not_start(kit: Kit, tmp_path: Path) -> None:
    """Nor if a new kit.yaml and federation.yaml come from where one person makes all keys and names all policies."""
    refusal = "site site-0 has none, and nothing leaves a site without it"
    assert refusal in kit.refusal()
    (tmp_path / "new.yaml").write_text(POLICY)
    sites = [{"name": f"site-{number}", "policy": str(tmp_path / "new.yaml")} for number in range(3)]
    send_new_kit(kit, tmp_path, sites=sites)
    assert refusal in kit.refusal()


@pytest.mark.parametrize("change_of", [{"trial": True}, {"policy": "../new.yaml"}], ids=str)
def test_a_kit_file_cannot_talk_a_site_out_of_its_policy(kit: Kit, change_of: dict[str, Any]) -> None:
    (kit.folder.parent / "new.yaml").write_text(POLICY)
    change(kit.folder, **change_of)
    with pytest.raises(ConfigError, match=f"{next(iter(change_of))}: not decided by a kit"):
        kit.start()
    assert not kit.fleet.children


def test_a_new_kit_file_neither_replaces_nor_drops_the_policy(kit: Kit, tmp_path: Path) -> None:
    (kit.folder / "policy.yaml").write_text(POLICY)
    before = kit.policy()
    assert (before["epsilon"], before["file"]) == (2, str(kit.folder / "policy.yaml"))
    send_new_kit(kit, tmp_path, rounds=50)
    after = kit.policy()
    assert {key: after[key] for key in ("sha256", "file", "epsilon")} == {
        key: before[key] for key in ("sha256", "file", "epsilon")
    }
    (kit.folder / "policy.yaml").unlink()
    assert "nothing leaves a site without it" in kit.refusal()


def test_a_task_that_the_policy_does_not_list_is_not_trained(kit: Kit, tmp_path: Path) -> None:
    (kit.folder / "policy.yaml").write_text(POLICY)
    send_new_kit(kit, tmp_path, task={"dataset": "mnist"})
    assert "task 'mnist' is not allowed here; allowed: digits" in kit.refusal()


# The ledger and its witness

PRIVATE = Federation.parse(
    "name: test\nsites: {count: 4, epsilon: 1}\ncohort: 4\nquorum: 3\ndeadline: 60\n"
    "rounds: 9\nprivatise: {kind: ldp, clip: 1.0}\nroute: {kind: shuffler, n_min: 3}\n"
)
EARLY = 30.0  # seconds: a round that waits for somebody lasts twice as long


@dataclass
class Member:
    """A worker whose shuffler is real; the other three sites only send noise."""

    folder: Path
    fleet: Fleet
    shuffler: Deployment

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def policy(self) -> Path:
        return self.folder / "policy.yaml"

    def start(self) -> None:
        config, own = self.folder / "federation.yaml", self.shuffler.keys.of("site", "site-0")
        first, *others = PRIVATE.sites
        first = first.model_copy(update={"policy": self.policy if self.policy.exists() else None})
        config.write_text(PRIVATE.model_copy(update={"sites": (first, *others)}).to_yaml())
        command = ["--config", config, "--keys", own.folder, "--site", "site-0", "--state", self.state, "--trial"]
        command += ["--middleware", self.shuffler.address, "--socket", self.folder / "socket"]
        self.fleet.start("worker", [sys.executable, "-m", "client_app.worker", *map(str, command)])
        self.fleet.wait_for("worker", "listening", START)

    def stop(self) -> None:
        self.fleet.stop("worker")

    def play(self, round: int) -> tuple[int, float]:
        """A round of all four sites: how many updates were released, and after how many seconds."""
        layout, server = layout_of(PRIVATE), self.shuffler.server
        layers = [part.stop for part in layout.layers]
        terms: dict[str, Any] = {"cohort": 4, "quorum": 3, "deadline": PRIVATE.deadline}
        header = round_header("run", round, layout.size, layout=layout.digest, layers=layers, **terms)
        model = np.full(layout.size, round / 100, np.float32)
        header = open_round(server, header, model)
        began = time.monotonic()
        ticket = threading.Thread(target=self._take_part, args=(round,), daemon=True)
        ticket.start()
        for index in (1, 2, 3):
            submit(self.shuffler.site(index), header, model + index, tier=PRIVATE.sites[index].tier)
        release = collect(server, header)
        seconds = time.monotonic() - began
        assert release.phase == "released"
        ticket.join(CALL)
        return release.count, seconds

    def _take_part(self, round: int) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(CALL)
            line.connect(str(self.folder / "socket"))
            pipe.send(line, {"run": "run", "federation": PRIVATE.digest, "first": round, "last": round}, b"")
            pipe.receive(line)


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    keys = Keys(tmp_path / "pki")
    for party in (*(("site", f"site-{i}") for i in range(4)), ("server", "server"), ("shuffler", "shuffler")):
        keys.of(*party)
    shuffler = deploy(tmp_path / "shuffler", keys, PRIVATE, "shuffler")
    made = Member(tmp_path / "site", Fleet(tmp_path / "logs", tmp_path / "pids"), shuffler)
    made.state.mkdir(parents=True)
    accepted.accept(Keyring(keys.of("site", "site-0").folder).roster(), made.state)
    try:
        yield made
    finally:
        made.fleet.stop()
        shuffler.stop()


def test_a_site_whose_whole_folder_was_set_back_sends_nothing_and_says_what_to_do(
    member: Member, tmp_path: Path
) -> None:
    """Its own disk shows nothing wrong; only the shuffler remembers how much was spent."""
    member.start()
    assert member.play(1)[0] == 4
    shutil.copytree(member.state, tmp_path / "older")
    assert member.play(2)[0] == 4
    member.stop()
    shutil.rmtree(member.state)
    shutil.copytree(tmp_path / "older", member.state)
    member.start()
    assert member.play(3)[0] == 3
    (found,) = events(member.fleet, "not-sent")
    assert "has 1 entries, and the middleware has seen 2; restore" in found["reason"]
    assert "docs/privacy.md" in found["reason"]
    assert not events(member.fleet, "uploaded")
    assert not events(member.fleet, "charged")
    request = pb.FinishRequest(run="run")
    member.shuffler.server.finish(request, timeout=CALL)


# A round does not wait for a site that sends nothing (row l)


def test_later_rounds_do_not_wait_for_a_site_whose_budget_is_spent(member: Member) -> None:
    member.policy.write_text("epsilon_per_round: 1\nepsilon: 1.2\ntasks: [digits]\nallow_plain_counts: true\n")
    member.start()
    assert member.play(1)[0] == 4
    for round in (2, 3, 4):
        count, seconds = member.play(round)
        assert count == 3
        assert seconds < EARLY
    assert ["budget: " in found["reason"] for found in events(member.fleet, "not-sent")] == [True] * 3


def test_rounds_do_not_wait_for_a_site_whose_operator_has_not_approved_the_run(member: Member) -> None:
    """Nor for one that has just started; the approval counts from the next round on, and so does a new policy."""
    policy = "epsilon_per_round: 1\nepsilon: 99\ntasks: [digits]\nallow_plain_counts: true\n"
    member.policy.write_text(policy + "approve_runs: true\n")
    member.start()
    for round in (1, 2):
        count, seconds = member.play(round)
        assert count == 3
        assert seconds < EARLY
    approvals.approve("run", PRIVATE, member.state)
    assert member.play(3)[0] == 4
    member.policy.write_text(policy.replace("digits", "mnist"))
    count, seconds = member.play(4)
    assert count == 3
    assert seconds < EARLY
    reasons = [found["reason"] for found in events(member.fleet, "not-sent")]
    assert ["is not approved here" in reason for reason in reasons] == [True, True, False]
    assert "task 'digits' is not allowed here" in reasons[-1]
