"""A run is resumed only under its own config, and its signed manifest says what was changed and what it guarantees."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.config.changes import accepted
from fl_privacy.config.evaluate import TELLING
from fl_privacy.config.guarantee import Asked, guarantee, stated
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.resume import Earlier, check
from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.dp import gaussian
from fl_privacy.errors import ConfigError, FederationError, LaunchError, TranscriptError
from fl_privacy.transcript import RunWriter, open_run, verify
from fl_privacy.transcript.run import SIGNED_FIELDS
from fl_privacy.transcript.signing import Signer
from fl_privacy.transcript.write import write_manifest
from fl_privacy.vector import Layout
from server_app.statement import Statement
from transcripts import CA, RUN, SERVER, SITE

BASE = "name: base\nsites: [{name: a}, {name: b}, {name: c}]\nrounds: 5\ndeadline: 60\n"


def manifest(federation: Federation) -> dict[str, Any]:
    return {"config": json.loads(json.dumps(federation.model_dump(mode="json"))), "digest": federation.digest}


def changed(text: str, base: str = BASE) -> dict[str, tuple[Any, Any]]:
    found = accepted(manifest(Federation.parse(base)), Federation.parse(text), "run-1")
    return {change.field: (change.old, change.new) for change in found}


def test_the_same_config_changes_nothing() -> None:
    assert changed(BASE) == {}


def test_more_rounds_a_longer_deadline_and_places_may_change() -> None:
    sites = "[{name: a, data: /d, device: cuda, policy: /p}, {name: b}, {name: c}]"
    text = f"name: base\nsites: {sites}\nrounds: 9\ndeadline: 90\nhosts: {{superlink: 'h:1', shuffler: 'h:2'}}\n"
    found = changed(text)
    assert found["rounds"] == (5, 9)
    assert found["deadline"] == (60.0, 90.0)
    assert found["sites.a.data"] == (None, "/d")
    assert found["sites.a.device"] == ("cpu", "cuda")
    assert {field.partition(".")[0] for field in found} == {"rounds", "deadline", "sites", "hosts"}


REFUSED = {
    BASE.replace("rounds: 5", "rounds: 4"): "rounds: 5 -> 4",
    BASE.replace("deadline: 60", "deadline: 30"): "deadline: 60 -> 30",
    BASE + "seed: 3": "seed: 0 -> 3",
    BASE + "audit: true": "audit: False -> True",
    BASE + "reproducible: true": "reproducible: False -> True",
    BASE + "route: {kind: shards}": "route.kind: shuffler -> shards",
    BASE + "route: {kind: shuffler, level: model}": "route.level: parameter -> model",
    BASE + "task: {partition: {kind: dirichlet}}": "task.partition.kind: auto -> dirichlet",
    BASE + "task: {train: {lr: 0.2}}": "task.train.lr: 0.1 -> 0.2",
    BASE.replace("{name: c}", "{name: d}"): "sites.c: .* -> none; sites.d: none -> ",
    BASE.replace("name: base", "name: other"): "name: base -> other",
}


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused_with_what_differs(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        changed(text)
    first, _, last = REFUSED[text].partition(".*")
    assert first in str(error.value)
    assert last in str(error.value)
    assert "only more rounds" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_digest_that_no_key_explains_is_refused() -> None:
    """The code of a task, or a version that reads the same keys otherwise."""
    before = {**manifest(Federation.parse(BASE)), "digest": "0" * 64}
    with pytest.raises(ConfigError, match="no key differs"):
        accepted(before, Federation.parse(BASE), "run-1")


def asked(evaluations: int = 0, **updates: int) -> Asked:
    return Asked(Counter(updates), Counter(dict.fromkeys(updates, evaluations)))


NOISY = "sites: [{name: a, epsilon: 2}, {name: b, epsilon: 4}, {name: c, epsilon: 4}]\nprivatise: {kind: %s}\n"


def test_a_guarantee_of_noisy_updates_composes_what_was_asked() -> None:
    terms = guarantee(Federation.parse(NOISY % "ldp"), asked(a=3, b=1))
    assert (terms.unit, terms.adjacency, terms.seeded) == ("site", "replace", False)
    a, b, c = (terms.budgets[name] for name in "abc")
    assert a.epsilon == pytest.approx(gaussian.epsilon(gaussian.sigma(2.0, 1e-5) / 3**0.5, 1e-5))
    assert b.epsilon == pytest.approx(4.0)
    assert (c.attempts, c.epsilon, c.delta) == (0, 0.0, 1e-5)


def test_a_total_is_what_the_ledger_keeps_to() -> None:
    text = (NOISY % "ldp").replace("epsilon", "epsilon_total") + "rounds: 4"
    whole, retried = (guarantee(Federation.parse(text), asked(a=attempts)).budgets["a"] for attempts in (4, 9))
    assert [whole.epsilon, retried.epsilon] == pytest.approx([2.0, 2.0])
    assert whole.epsilon_per_round is not None
    assert whole.epsilon_per_round < 2.0
    records = guarantee(Federation.parse(text.replace("ldp", "dpsgd")), asked(a=4)).budgets["a"]
    assert (records.epsilon_per_round, records.epsilon) == (None, 2.0)


def test_a_total_is_planned_for_its_rounds() -> None:
    text = (NOISY % "ldp").replace("epsilon", "epsilon_total") + "rounds: 4\ndeadline: 60\n"
    assert changed(text.replace("60", "90"), text) == {"deadline": (60.0, 90.0)}
    with pytest.raises(ConfigError, match="epsilon_total is planned for 4 rounds, and 5 were given"):
        changed(text.replace("rounds: 4", "rounds: 5"), text)


EVALUATED = NOISY % "ldp" + "route: {kind: shuffler}\nevaluate: {by: sites%s}\n"


def test_evaluations_are_charged_too_and_covered_only_with_noise() -> None:
    plain, noised = (Federation.parse(EVALUATED % more) for more in ("", ", epsilon: 2"))
    for federation, covered in ((plain, False), (noised, True)):
        terms = guarantee(federation, asked(1, a=1))
        assert any("held-out" in text for text in terms.not_covered) is not covered
        assert terms.budgets["a"].evaluations == int(covered)
        twice = gaussian.epsilon(gaussian.sigma(2.0, 1e-5) / 2**0.5, 1e-5)
        assert terms.budgets["a"].epsilon == pytest.approx(twice if covered else 2.0)


@pytest.mark.parametrize(
    ("text", "stated"),
    [("evaluate: sites", True), ("evaluate: sites\nroute: {kind: shuffler, n_min: 4}", False), ("", False)],
)
def test_a_run_says_that_sums_over_different_cohorts_tell_about_sites(text: str, stated: bool) -> None:
    found = guarantee(Federation.parse(f"sites: 4\n{text}"), Asked(Counter(), Counter()))
    assert (TELLING in found.not_covered) is stated


def test_what_depends_on_a_site_s_records_is_left_to_its_ledger() -> None:
    terms = guarantee(Federation.parse(NOISY % "dpsgd"), asked(a=3))
    assert (terms.unit, terms.adjacency) == ("record", "add-or-remove")
    assert (terms.budgets["a"].epsilon_per_round, terms.budgets["a"].epsilon) == (2.0, None)


@pytest.mark.parametrize("text", [BASE, NOISY % "ldp" + "reproducible: true", NOISY % "dpsgd" + "reproducible: true"])
def test_without_noise_or_with_seeded_noise_nothing_is_guaranteed(text: str) -> None:
    terms = guarantee(Federation.parse(text), asked(a=3))
    assert (terms.unit, terms.adjacency, terms.sites) == ("none", "none", "none")
    assert terms.seeded == bool(terms.not_covered) == ("reproducible" in text)
    assert next(iter(terms.lines())) == "guarantee: none (no differential privacy)"


def test_the_route_says_whom_its_sites_trust() -> None:
    trusted = {
        "{kind: server}": {("server",), ("superlink",)},
        "{kind: shuffler}": {("shuffler",)},
        "{kind: shards, aggregators: 2}": {("aggregator-0", "aggregator-1"), ("evaluator",)},
        "{kind: shards, aggregators: 2, placement: sites}\nevaluate: sites": {("site-0", "site-1")},
    }
    for route, parties in trusted.items():
        terms = guarantee(Federation.parse(f"sites: 3\nroute: {route}"), asked())
        assert {one.parties for one in terms.trust} == parties


def test_an_audited_run_says_what_lies_in_its_folder() -> None:
    assert "truth/" in " ".join(guarantee(Federation.parse(BASE + "audit: true"), asked()).lines())


@pytest.mark.parametrize(
    "found", [{}, {"trust": 1}, {"unit": "\x1b[31m", "trust": [], "seeded": False, "not_covered": []}]
)
def test_a_guarantee_that_nobody_vouches_for_is_checked_when_it_is_read(found: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="guarantee"):
        stated({"guarantee": found}, "run-1")


def test_a_guarantee_reads_back_the_same() -> None:
    terms = guarantee(Federation.parse(NOISY % "ldp"), asked(a=3, b=1))
    assert stated({"guarantee": json.loads(json.dumps(terms.model_dump(mode="json")))}, "run-1") == terms
    assert stated({"private": True}, "run-1") is None


@pytest.mark.parametrize(("status", "attempts"), [("failed", 2), ("running", 2 + 3 * 3)])
def test_a_server_that_was_killed_counts_every_attempt_that_it_may_have_made(
    status: str, attempts: int, tmp_path: Path
) -> None:
    """Of rounds 3 and 4, and of the one that was open: three attempts each, at most."""
    federation = Federation.parse(NOISY % "ldp")
    before = {**manifest(federation), "format": 2, "run": "r", "rounds": 2, "status": status}
    before |= {"guarantee": guarantee(federation, asked(a=2, b=2, c=2)).model_dump(mode="json")}
    (tmp_path / "manifest.json").write_text(json.dumps({**before, "observers": {}, "heads": {}, "files": {}}))
    plan = ServerPlan(run="r", run_dir=tmp_path, config=tmp_path, keys=tmp_path, log=tmp_path)
    found = Statement(federation, plan, Layout(()), 4).begin()
    assert (found["rounds"], found["guarantee"]["sites"]["a"]["attempts"]) == (4, attempts)


# Whose word a resumed run starts on


def interrupted(runs: Path, federation: Federation) -> Path:
    """A run that its server has begun, and a folder of runs with its authority."""
    (runs / "pki").mkdir(parents=True)
    (runs / "pki" / "ca.pem").write_bytes(CA.pem)
    config = federation.model_dump(mode="json")
    RunWriter(runs / RUN, {"run": RUN, "config": config, "digest": federation.digest, "observers": {}}, *SERVER)
    return runs / RUN


def with_code(path: Path, source: str) -> bytes:
    """The manifest with a task of somebody's own in its config."""
    found = json.loads((path / "manifest.json").read_text())
    task = {"code": "task.py", "source": source, "sha256": hashlib.sha256(source.encode()).hexdigest()}
    found["config"]["task"] = task
    return json.dumps(found, indent=2).encode() + b"\n"


def test_a_manifest_that_was_changed_starts_nothing_and_runs_no_code(tmp_path: Path) -> None:
    """Its config, and the code of a task in it, would run at every site of this machine."""
    federation = Federation.parse(BASE)
    path = interrupted(tmp_path / "runs", federation)
    assert Earlier.find(path, tmp_path).federation().digest == federation.digest
    check(path, federation)
    ran = tmp_path / "ran"
    (path / "manifest.json").write_bytes(with_code(path, f"open({str(ran)!r}, 'w')\n"))
    for start in (
        lambda: Earlier.find(path, tmp_path).federation(),
        lambda: check(path, federation),
        lambda: up(federation, "simulation", path.parent, resume=path),
    ):
        with pytest.raises(TranscriptError, match="the signature does not fit the content"):
            start()
    assert not ran.exists()


def test_a_manifest_that_another_party_signed_starts_nothing(tmp_path: Path) -> None:
    federation = Federation.parse(BASE)
    path = interrupted(tmp_path / "runs", federation)
    found = json.loads((path / "manifest.json").read_text())
    write_manifest(path, {name: value for name, value in found.items() if name not in SIGNED_FIELDS}, Signer(*SITE))
    with pytest.raises(TranscriptError, match="a manifest is the server's to sign"):
        Earlier.find(path, tmp_path).federation()
    (path.parent / "pki" / "ca.pem").unlink()
    with pytest.raises(LaunchError, match=r"ca\.pem is missing"):
        check(path, federation)


# Whole runs

SMALL = """
name: small
sites: [{name: a, epsilon: 8}, {name: b, epsilon: 8}, {name: c, epsilon: 8}]
rounds: 1
deadline: 60
privatise: {kind: ldp}
route: {kind: shuffler, n_min: 2}
task: {train: {epochs: 1}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(runs: Path) -> Path:
    """One round in simulation."""
    result = up(Federation.parse(SMALL), "simulation", runs)
    assert result.status == "completed", result.reason
    return Path(result.path)


@pytest.mark.e2e
def test_the_manifest_of_a_run_states_its_rounds_and_its_guarantee(finished: Path) -> None:
    found = open_run(finished).manifest
    terms = stated(found, "run")
    assert terms is not None
    assert (found["rounds"], found["changes"], "private" in found) == (1, [], False)
    assert {name: (one.attempts, one.epsilon) for name, one in terms.budgets.items()} == {
        name: (1, pytest.approx(8.0)) for name in "abc"
    }


@pytest.mark.e2e
def test_a_run_is_resumed_with_more_rounds_and_says_so(finished: Path, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="complete after 1 rounds"):
        check(finished, Earlier.find(finished.name, runs).federation())
    other = Federation.parse(SMALL + "seed: 3")
    with pytest.raises(ConfigError, match="seed: 0 -> 3"):
        up(other, "simulation", runs, resume=finished.name)
    before = (finished / "manifest.json").read_bytes()
    longer = tmp_path / "longer.yaml"
    longer.write_text(SMALL.replace("rounds: 1", "rounds: 2"))
    # Neither engine nor folder of runs is given: the run knows both.
    done = cli("up", longer, "--resume", finished, "--json", whole=True)
    assert done.returncode == 0, done.stderr
    assert (finished / "manifest.json").read_bytes() != before
    found = open_run(finished).manifest
    (change,) = found["changes"]
    assert (change["from_round"], change["fields"]) == (2, [{"field": "rounds", "old": 1, "new": 2}])
    assert (found["rounds"], found["status"], found["config"]["rounds"]) == (2, "completed", 2)
    assert found["guarantee"]["sites"]["a"]["attempts"] == 2
    assert verify(finished, (runs / "pki" / "ca.pem").read_bytes()).ok
    shown = cli("transcript", "show", finished).stdout
    assert "changed from round 2: rounds 1 -> 2" in shown
    assert "shuffler alone can see every update and who sent it" in shown
    listed = json_of(cli("runs", "--runs-dir", runs, "--json"))["runs"]
    assert [(one["run"], one["round"], one["status"]) for one in listed] == [(finished.name, 2, "completed")]


@pytest.mark.e2e
def test_nothing_starts_with_a_ledger_that_was_deleted_or_set_back(finished: Path, runs: Path) -> None:
    """Another run would spend again what the sites have spent in this one."""
    there, ledger = set(runs.iterdir()), runs / "sites" / "small" / "b" / "ledger.jsonl"
    newest = ledger.read_bytes()
    ledger.unlink()
    with pytest.raises(FederationError, match="was here and is missing; restore the newest copy"):
        up(Federation.parse(SMALL), "simulation", runs)
    ledger.write_bytes(newest[: newest.index(b"\n") + 1])
    with pytest.raises(FederationError, match=r"has 0 entries, and .* has seen [12]; restore the newest copy"):
        up(Federation.parse(SMALL), "simulation", runs)
    assert set(runs.iterdir()) == there
    ledger.write_bytes(newest)


@pytest.mark.e2e
def test_a_federation_of_the_same_name_and_another_unit_starts_nothing(finished: Path, runs: Path) -> None:
    """Whoever has been charged for whole updates cannot be charged for records: nobody is, and no process starts."""
    there = set(runs.iterdir())
    ledgers = {path: path.read_bytes() for path in (runs / "sites").rglob("ledger.jsonl")}
    assert len(ledgers) == 3
    shutil.rmtree(runs / "sites" / "small" / "c")  # not all of them need to have been charged
    with pytest.raises(FederationError, match=r"protects a site .* this federation a record"):
        up(Federation.parse(SMALL.replace("ldp", "dpsgd")), "simulation", runs)
    assert set(runs.iterdir()) == there
    assert {path: path.read_bytes() for path in (runs / "sites").rglob("ledger.jsonl")}.items() <= ledgers.items()
    shutil.rmtree(runs / "sites" / "small")
