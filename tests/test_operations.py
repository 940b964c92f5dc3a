"""What real processes show an operator: metrics that identify nobody, and a log of all important events."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app import worker
from client_app.site import Site
from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import Result, up
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.processes import Fleet
from fl_privacy.ops import scrape
from fl_privacy.ops.log import Log
from fl_privacy.ops.status import Status, read
from fl_privacy.ops.tail import Tail
from fl_privacy.round.terms import FAREWELLS
from fl_privacy.tasks.workload import layout_of
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import digest
from helpers import (
    CALL,
    START,
    Deployment,
    Keys,
    ask_of,
    collect,
    eventually,
    open_round,
    round_header,
    send,
    status,
    submit,
    vector_header as header_for,
)
from observed import get, kept, values

LENGTH = 100
BYTES_IN, BYTES_OUT = (f'fl_privacy_bytes_total{{direction="{way}"}}' for way in ("in", "out"))
SITES = ("site-0", "site-1", "site-2")


# A real shuffler, and callers that break the rules.


@dataclass
class Watched:
    """A running shuffler, its metrics address and its event file."""

    deployment: Deployment
    metrics: str
    events: Path

    def samples(self) -> dict[str, float]:
        return values(get(self.metrics)[1])


@contextmanager
def watched(folder: Path, keys: Keys, name: str, route: dict[str, Any], *arguments: str) -> Iterator[Watched]:
    """A middleware with metrics and an event file."""
    role = name.partition("-")[0]
    sites = [{"name": site} for site in SITES]
    federation = Federation.model_validate({"name": "test", "sites": sites, "route": route})
    (folder / "c.yaml").write_text(federation.to_yaml())
    command = [sys.executable, "-m", f"{role}_app", "--config", str(folder / "c.yaml"), *arguments]
    command += ["--keys", str(keys.of(role, name).folder), "--state", str(folder / "state")]
    command += ["--metrics", "127.0.0.1:0", "--events", str(folder / "kept" / "events.jsonl")]
    fleet = Fleet(folder / "logs", folder / "pids.json")
    try:
        fleet.start(name, command)
        address = str(fleet.wait_for(name, "listening", START)["address"])
        scraped = str(fleet.wait_for(name, "metrics", START)["address"])
        deployment = Deployment(fleet, name, address, keys, federation)
        yield Watched(deployment, scraped, folder / "kept" / "events.jsonl")
        deployment.close_channels()
    finally:
        fleet.stop()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def shuffler(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("shuffler"), keys, "shuffler", {"kind": "shuffler"}) as running:
        yield running


def test_a_round_is_reported_when_it_is_over_without_who_sent_what(shuffler: Watched) -> None:
    good, calls = np.ones(LENGTH, np.float32), shuffler.deployment
    before = shuffler.samples()
    round = open_round(calls.server, round_header("run-a", 1, LENGTH))
    model = 4 * LENGTH
    assert shuffler.samples()["fl_privacy_open_rounds"] == before["fl_privacy_open_rounds"] + 1
    submit(calls.site(0), round, good)
    submit(calls.site(1), round, good)
    during = shuffler.samples()
    assert during[BYTES_IN] == before[BYTES_IN] + model
    submit(calls.site(2), round, good)
    assert collect(calls.server, round).count == 3
    where = {"run": round.run, "round": round.round, "attempt": round.attempt}
    calls.server.settle(pb.SettleRequest(**where, commit=True), timeout=CALL)
    released = 'fl_privacy_rounds_total{outcome="released"}'
    eventually(lambda: shuffler.samples()[released] == before[released] + 1)
    after = shuffler.samples()
    assert after[BYTES_IN] == during[BYTES_IN] + 3 * model
    assert after[BYTES_OUT] == 3 * model
    assert after["fl_privacy_open_rounds"] == before["fl_privacy_open_rounds"]
    for phase in ("waiting", "receiving", "mixing", "releasing"):
        assert after[f'fl_privacy_phase_seconds_count{{phase="{phase}"}}'] >= 1
    assert "site" not in get(shuffler.metrics)[1]


def test_the_kept_log_records_who_joined_and_what_was_released_on_which_terms(shuffler: Watched) -> None:
    good, calls = np.ones(LENGTH, np.float32), shuffler.deployment
    round = open_round(calls.server, round_header("run-b", 1, LENGTH))
    for site in range(3):
        submit(calls.site(site), round, good)
        submit(calls.site(site), round, good)
    collect(calls.server, round)
    short = open_round(calls.server, round_header("run-b", 2, LENGTH, deadline=0.3))
    submit(calls.site(0), short, good)
    assert collect(calls.server, short).phase == "failed"
    superseded = open_round(calls.server, round_header("run-b", 3, LENGTH))
    last = open_round(calls.server, round_header("run-b", 3, LENGTH))
    calls.server.finish(pb.FinishRequest(run="run-b"), timeout=CALL)

    def mine(event: str) -> list[dict[str, Any]]:
        return [e for e in kept(shuffler.events) if e["run"] == "run-b" and e["event"] == event]

    eventually(lambda: len(mine("not-released")) == 3)
    assert sorted(e["site"] for e in mine("joined")) == sorted(SITES)
    (released,) = mine("released")
    wanted = {"round": 1, "attempt": round.attempt, "count": 3, "floor": 3, "level": "parameter", "buckets": "none"}
    assert wanted.items() <= released.items()
    assert released["sets"] == [3]
    reasons = {e["attempt"]: (e["count"], e["reason"]) for e in mine("not-released")}
    assert reasons == {
        short.attempt: (1, "1 of 3 updates came, 3 are needed"),
        superseded.attempt: (0, "a newer attempt was opened"),
        last.attempt: (0, "the run was finished"),
    }


def test_hostile_callers_create_no_labels_and_are_named_only_in_the_kept_log(shuffler: Watched) -> None:
    good, calls = np.ones(LENGTH, np.float32), shuffler.deployment
    round = open_round(calls.server, round_header("run-c", 1, LENGTH))
    stranger = calls.party("site", "mallory").stub
    for n in range(20):
        evil = f'run"}} 1\nevil_total{{x="{n}'
        assert status(send, calls.site(0), header_for(round, good, run=evil), good) == "NOT_FOUND"
        wrong = header_for(round, good, dtype=f"evil-{n}")
        assert status(send, calls.site(0), wrong, good) == "INVALID_ARGUMENT"
        assert status(send, stranger, header_for(round, good), good) == "PERMISSION_DENIED"
    assert status(open_round, calls.site(1), round_header("run-c", 1, LENGTH)) == "PERMISSION_DENIED"
    calls.server.finish(pb.FinishRequest(run="run-c"), timeout=CALL)
    text = get(shuffler.metrics)[1]
    assert "evil" not in text
    assert "mallory" not in text
    rejects = {name: count for name, count in values(text).items() if "rejects" in name}
    assert rejects['fl_privacy_rejects_total{code="NOT_FOUND",field="run"}'] == 20
    assert rejects['fl_privacy_rejects_total{code="PERMISSION_DENIED",field="site"}'] >= 20
    assert len(rejects) <= 6
    refused = [e for e in kept(shuffler.events) if e["event"] == "refused"]
    assert {"mallory", "site-0"} <= {e["peer"] for e in refused}
    told = Path(calls.fleet.children["shuffler"].log).read_text()
    assert '"peer"' not in told
    assert '"joined"' not in told
    assert all("digest" not in e and good.tobytes().hex() not in str(e) for e in refused)


def test_a_round_that_is_open_when_the_shuffler_stops_is_reported(shuffler: Watched) -> None:
    """This is the last test with this shuffler."""
    calls = shuffler.deployment
    round = open_round(calls.server, round_header("run-d", 1, LENGTH))
    calls.stop()
    ends = [e for e in kept(shuffler.events) if e.get("attempt") == round.attempt and e["event"] == "not-released"]
    assert [e["reason"] for e in ends] == ["the process was stopped"]


def test_an_aggregator_reports_the_same_about_its_shard(tmp_path: Path, keys: Keys) -> None:
    arguments = ("--index", "0")
    with watched(tmp_path, keys, "aggregator-0", {"kind": "shards", "aggregators": 2}, *arguments) as running:
        calls, shard = running.deployment, np.ones(LENGTH, np.float32)
        client.seed(calls.party("evaluator", "evaluator").stub, "run-a", 0, shard, CALL)
        round = open_round(calls.server, round_header("run-a", 1, LENGTH, shards=[digest(shard)]))
        for site in range(3):
            submit(calls.site(site), round, shard)
        assert collect(calls.server, round).phase == "closed"
        where = {"run": "run-a", "round": 1, "attempt": round.attempt}
        settle = pb.SettleRequest(**where, commit=True, members=b"\x07", senders=b"\0")
        calls.server.settle(settle, timeout=CALL)
        eventually(lambda: running.samples()['fl_privacy_rounds_total{outcome="released"}'] == 1)
        found, text = running.samples(), get(running.metrics)[1]
    assert found[BYTES_IN] == 4 * 4 * LENGTH
    assert found['fl_privacy_phase_seconds_count{phase="averaging"}'] == 1
    assert "site" not in text
    events = kept(running.events)
    assert sorted(e["site"] for e in events if e["event"] == "joined") == sorted(SITES)
    assert [(e["attempt"], e["count"], e["floor"]) for e in events if e["event"] == "released"] == [
        (round.attempt, 3, 3)
    ]


# A whole federation: every role is scraped while it runs, and every role keeps its log.

CONFIG = """
name: watched
rounds: 2
rounds_per_message: 2
deadline: 120
privatise: {kind: ldp, clip: 1.0}
task: {train: {epochs: 1}}
sites:
  - {name: site-0, epsilon: 8, policy: POLICY}
  - {name: site-1, epsilon: 8}
  - {name: site-2, epsilon: 8}
"""
POLICY = "epsilon_per_round: 8\nepsilon: 100\ntasks: [digits]\n"
PARTIES = ("server", "shuffler", "worker-site-0", "worker-site-1", "worker-site-2")


@dataclass
class Seen:
    """What an operator saw while a run was in progress, and its result."""

    result: Result
    policy: Path
    events: Path
    scrapes: dict[str, str] = field(default_factory=dict)
    states: list[Status] = field(default_factory=list)

    def kept(self, party: str, event: str) -> list[dict[str, Any]]:
        return [e for e in kept(self.events / f"{party}.jsonl") if e["event"] == event]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    runs, events = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("events")
    policy = runs / "policy.yaml"
    policy.write_text(POLICY)
    found = Seen(None, policy, events)  # type: ignore[arg-type]
    looked, start, plan, clear = 0.0, Fleet.start, Workspace.write_server_plan, Workspace.clear

    def asked(name: str) -> list[str]:
        return ["--metrics", "127.0.0.1:0", "--events", str(events / f"{name}.jsonl")]

    def start_asked(self: Fleet, name: str, command: list[str], *rest: Any, **options: Any) -> Any:
        return start(self, name, [*command, *(asked(name) if name in PARTIES else [])], *rest, **options)

    def plan_asked(self: Workspace, *rest: Any) -> None:
        plan(self, *rest)
        path = self.private / "server.json"
        extra = {"metrics": "127.0.0.1:0", "events": str(events / "server.jsonl")}
        path.write_text(json.dumps({**json.loads(path.read_text()), **extra}))

    def look(run_dir: Path) -> None:
        nonlocal looked
        alive = (run_dir.parent / ".state" / run_dir.name / "pids.json").exists()
        if time.monotonic() - looked < 0.5 and alive:
            return
        looked = time.monotonic()
        found.states.append(read(run_dir))
        for party in PARTIES:
            for event in Tail(run_dir / "logs" / f"{party}.log").poll():
                if event["event"] == "metrics":
                    try:
                        found.scrapes[party] = get(str(event["address"]))[1]
                    except OSError:
                        continue

    def clear_looked(self: Workspace) -> None:
        nonlocal looked
        looked = 0.0
        look(self.run_dir)
        clear(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "clear", clear_looked)
        patch.setattr(Fleet, "start", start_asked)
        patch.setattr(Workspace, "write_server_plan", plan_asked)
        found.result = up(Federation.parse(CONFIG.replace("POLICY", str(policy))), "local", runs, watch=look)
    return found


def test_every_role_can_be_scraped_during_the_run(seen: Seen) -> None:
    assert seen.result.status == "completed", seen.result.reason
    assert set(seen.scrapes) == set(PARTIES)
    for party, text in seen.scrapes.items():
        others = {name for name in SITES if name not in party}
        assert not any(name in text for name in others), party
    server, site = values(seen.scrapes["server"]), values(seen.scrapes["worker-site-0"])
    assert server['fl_privacy_phase_seconds_count{phase="evaluate"}'] >= 1
    for phase in ("fetching", "training", "privatising", "uploading"):
        assert site[f'fl_privacy_phase_seconds_count{{phase="{phase}"}}'] >= 1
    assert site['fl_privacy_rounds_total{outcome="uploaded"}'] >= 1
    assert 0 < site["fl_privacy_epsilon_spent"] < 100
    assert site["fl_privacy_epsilon_left"] == pytest.approx(100 - site["fl_privacy_epsilon_spent"])
    assert values(seen.scrapes["worker-site-1"])["fl_privacy_epsilon_left"] == float("inf")


# The final model, and the best one if that is another.
ONE_OR_TWO = ([3], [3, 4])


def test_a_site_s_log_records_what_left_it_under_which_policy(seen: Seen) -> None:
    sha256 = hashlib.sha256(seen.policy.read_bytes()).hexdigest()
    (policy,) = seen.kept("worker-site-0", "policy")
    assert {"sha256": sha256, "epsilon": 100.0, "epsilon_per_round": 8.0, "tasks": ["digits"]}.items() <= policy.items()
    (ticket,) = seen.kept("worker-site-0", "ticket")
    assert (ticket["run"], ticket["first"], ticket["last"], ticket["policy"]) == (
        seen.result.run,
        1,
        2 + FAREWELLS,
        sha256,
    )
    charged, sent = seen.kept("worker-site-0", "charged"), seen.kept("worker-site-0", "uploaded")
    uploaded = [event for event in sent if event["bytes"]]
    assert [event["round"] for event in sent if not event["bytes"]] in ONE_OR_TWO
    assert [(e["round"], e["epsilon"], e["policy"]) for e in charged] == [(1, 8.0, sha256), (2, 8.0, sha256)]
    ledger = next(row for row in seen.result.ledgers if row["site"] == "site-0")
    assert charged[-1]["spent"] == pytest.approx(ledger["spent"])
    assert charged[-1]["left"] == pytest.approx(ledger["remaining"])
    assert [(e["attempt"], e["private"], e["route"]) for e in uploaded] == [
        (e["attempt"], True, "shuffler") for e in charged
    ]
    assert seen.kept("worker-site-1", "policy")[0]["sha256"] is None


def test_the_other_logs_record_who_joined_what_was_released_and_the_progress_of_the_run(seen: Seen) -> None:
    assert sorted(e["site"] for e in seen.kept("shuffler", "joined")) == sorted(SITES)
    released, farewells = seen.kept("shuffler", "released"), [e["round"] for e in seen.kept("server", "farewell")]
    assert farewells in ONE_OR_TWO
    assert [(e["round"], e["count"]) for e in released] == [(round, 3) for round in (1, 2, *farewells)]
    assert [e["round"] for e in seen.kept("server", "evaluated")] == [0, 1, 2]
    assert len(seen.kept("server", "started")) == len(seen.kept("server", "completed")) == 1
    assert not any(name in json.dumps(e) for e in kept(seen.events / "server.jsonl") for name in SITES)


def test_status_follows_the_run_from_start_to_end(seen: Seen) -> None:
    states = [found.state for found in seen.states]
    assert [state for state, _ in itertools.groupby(states)] == ["waiting", "running", "completed"]
    running = next(found for found in seen.states if found.state == "running")
    assert {p.name for p in running.processes} >= {"superlink", "shuffler", "worker-site-0", "supernode-site-0"}
    assert all(p.alive and p.rss > 0 for p in running.processes)
    assert next(p.last for p in running.processes if p.name == "shuffler")
    found = json_of(cli("status", seen.result.path, "--json"))
    assert (found["state"], found["round"], found["rounds"], found["processes"]) == ("completed", 2, 2, [])
    assert found["score"]["accuracy"] == seen.result.accuracy
    assert found["bytes"] > 0
    spent = {row["site"]: row["spent"] for row in seen.result.ledgers}
    assert {b["site"]: b["spent"] for b in found["budgets"]} == pytest.approx(spent)


def test_a_site_reports_charges_resends_and_what_it_did_not_send(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("epsilon_per_round: 8\nepsilon: 9\ntasks: [digits]\nroutes: [server]\n")
    route = "route: {kind: server}\nrounds_per_message: 1\n"
    text = CONFIG.replace("POLICY", str(policy)).replace("rounds_per_message: 2\n", route)
    federation = Federation.parse(text)
    log = Log("site-0", events=tmp_path / "e")
    metrics = scrape.Prometheus("site", "site-0")
    keys, layout = Keys(tmp_path / "keys", federation.name), layout_of(federation)
    site = Site(federation, "site-0", keys.of("site", "site-0"), [], state=tmp_path, log=log, metrics=metrics)
    model = bytearray(4 * site._work.layout.size)

    def ask(round: int, **changes: Any) -> tuple[str, bytes]:
        made = ask_of(federation, keys, "run-1", round, digest(np.zeros(site._work.layout.size, np.float32)), layout)
        ticket = {"run": "run-1", "federation": federation.digest, "first": round, "last": round}
        ticket["terms"] = made.terms.to_json()
        ticket |= changes
        fields, update = worker.answer(site, ticket, model)
        return fields["status"], bytes(update)

    first = ask(1)
    assert ask(1) == first
    assert [ask(2)[0], ask(1, federation="0" * 64)[0], ask(1, run="../x")[0]] == ["abstain"] * 3
    told = [(e["event"], e["round"]) for e in kept(tmp_path / "e") if e["event"] not in ("policy", "ready", "ticket")]
    once = [("uploaded", 1), ("done", None)]
    assert told == [
        ("charged", 1), *once, ("resend", 1), *once, ("not-sent", 2), ("done", None), *[("refused", None)] * 2
    ]  # fmt: skip
    events = {e["event"]: e for e in kept(tmp_path / "e")}
    assert events["resend"]["spent"] == events["charged"]["spent"] == pytest.approx(8, rel=1e-3)
    assert "budget" in events["not-sent"]["reason"]
    found = values(metrics.text().decode())
    assert found['fl_privacy_rounds_total{outcome="uploaded"}'] == 2
    assert found['fl_privacy_rejects_total{code="LOCAL",field="budget"}'] == 1
    assert found['fl_privacy_rejects_total{code="FAILED_PRECONDITION",field="ticket"}'] == 1
