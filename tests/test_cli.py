"""Commands that need no run: plan, preflight, and how errors are reported."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.deploy.preflight import checks
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority
from transcripts import make_run

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_plan_counts_vectors_in_and_out() -> None:
    """What one party sends, another receives."""
    for route in ("{kind: server}", "{kind: shuffler}", "{kind: shards, aggregators: 4}"):
        federation = Federation.parse(f"sites: 6\nroute: {route}")
        costs = federation.route.cost(federation, 1000)
        sent = sum(c.count * c.parameters_out for c in costs)
        received = sum(c.count * c.parameters_in for c in costs)
        assert sent == received


def test_a_sharded_server_receives_no_parameters() -> None:
    federation = Federation.parse("sites: 6\nroute: {kind: shards}")
    server = federation.route.cost(federation, 1000)[0]
    assert (server.party, server.parameters_in, server.parameters_out) == ("server", 0, 0)


def test_plan_prints_json() -> None:
    plan = json_of(cli("plan", QUICKSTART, "--json"))
    assert plan["parameters"] == 4810
    shuffler = next(row for row in plan["per_round"] if row["party"] == "shuffler")
    assert shuffler["bytes_in"] == 4 * 4810 * 6


def test_a_run_that_somebody_sent_does_not_control_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    text = (run / "manifest.json").read_text().replace('"completed"', '"\\u001b[2J\\u001b[1;31mok\\u202e"')
    (run / "manifest.json").write_text(text)
    found = [cli("transcript", "show", run), cli("transcript", "verify", run, "--ca", run / "manifest.json")]
    assert "\\x1b[2J\\x1b[1;31mok\\u202e" in found[0].stdout
    assert not any(c in done.stdout + done.stderr for done in found for c in "\x1b\u202e")


def test_preflight_passes_on_the_quickstart(tmp_path: Path) -> None:
    done = cli("preflight", QUICKSTART, "--runs-dir", tmp_path, "--json")
    assert done.returncode == 0, done.stdout
    assert {c["name"] for c in json_of(done)["checks"]} >= {"flower", "disk", "data", "device", "port"}


def test_preflight_lists_all_failures_at_once_each_with_its_fix(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("sites: [{name: a, device: 'cuda:9'}, {name: b}, {name: c}]\ntask: {dataset: mnist}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli("preflight", config, "--data-dir", tmp_path, "--listen", address, "--json")
    assert done.returncode == 2
    failed = {c["name"]: c["fix"] for c in json_of(done)["checks"] if not c["ok"]}
    assert failed.keys() == {"device", "data", "port"}
    assert all(failed.values())


def test_preflight_names_the_problems_of_all_sites(tmp_path: Path) -> None:
    options = {"label": {"name": "y", "levels": [0, 1]}, "features": ["x"], "held_out": {"column": "x", "value": "2"}}
    sites = [{"name": name, "data": str(tmp_path / name)} for name in "abc"]
    federation = Federation.of({"sites": sites, "task": {"dataset": "csv", "options": options}})
    for name, cell in zip("abc", ("1", "one", "two"), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.csv").write_text(f"x,y\n{cell},0\n2,1\n3,1\n")
    found = checks.data(federation, None)
    assert not found.ok
    for name in "bc":
        assert f"\n1 problem in {tmp_path / name}: t.csv, line 2, column 'x': not a number" in found.detail
    assert (found.detail.count("\n"), found.detail.count("data:"), found.fix) == (2, 0, "")
    for name in "bc":
        (tmp_path / name / "t.csv").write_text("x,y\n1,0\n2,1\n3,1\n")
    assert checks.data(federation, None).detail == "csv: 6 training and 3 held-out records"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "pki")


FEDERATION = Federation.parse("name: here\nsites: 3")


def failures(keys: Keyring) -> dict[str, str]:
    return {c.name: c.detail for c in checks.certificates(FEDERATION, keys) if not c.ok}


def test_good_keys_pass(authority: Authority, tmp_path: Path) -> None:
    assert failures(authority.issue(Identity("here", "site", "site-0"), tmp_path / "k")) == {}


def test_a_key_that_does_not_match_the_certificate_is_named(authority: Authority, tmp_path: Path) -> None:
    keys = authority.issue(Identity("here", "site", "site-0"), tmp_path / "k")
    other = authority.issue(Identity("here", "site", "site-1"), tmp_path / "o")
    keys.key_file.write_bytes(other.key_file.read_bytes())
    assert failures(keys).keys() == {"key"}


def test_a_foreign_authority_and_federation_are_named(authority: Authority, tmp_path: Path) -> None:
    keys = authority.issue(Identity("there", "site", "site-0"), tmp_path / "k")
    keys.authority_file.write_bytes(Authority.open(tmp_path / "other").pem)
    assert failures(keys).keys() == {"authority", "identity"}


def test_missing_keys_are_named(tmp_path: Path) -> None:
    assert "key.pem" in failures(Keyring(tmp_path))["keys"]


ERRORS = [
    (("up", "nowhere.yaml"), "nowhere.yaml"),
    (("up", QUICKSTART, "--engine", "cloud"), "cloud"),
    (("transcript", "show", "nowhere"), "nowhere"),
    (("transcript", "verify", "nowhere"), "no such run"),
    (("plan", QUICKSTART, "--jsn"), "--jsn"),
    (("preflight", QUICKSTART, "--peer", "127.0.0.1:1"), "--keys"),
    (("up", QUICKSTART, "--resume", "nothing"), "nothing"),
    (("report", "nothing"), "No such command 'report'. Did you mean 'export'?\n"),
]


@pytest.mark.parametrize(("words", "named"), ERRORS, ids=[" ".join(map(str, e[0]))[-40:] for e in ERRORS])
def test_an_error_is_one_line_and_exit_code_2(words: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = cli(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
