"""`fl-privacy train`: a SuperLink that disappears and returns, and copies of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from commands import cli
from fl_privacy.deploy.engines import follow
from fl_privacy.deploy.flower import Status
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.kits.train import export
from fl_privacy.errors import LaunchError
from fl_privacy.identity.pki import Authority
from fl_privacy.transcript.run import anchor
from kits import federation


def refusal(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://127.0.0.1")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, text="not you", request=request))


class SuperLink:
    """Answers status requests from a list; raises entries that are errors."""

    def __init__(self, *answers: Exception | Status) -> None:
        self._answers = list(answers)

    def status(self, run: int) -> Status:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL", 0.0)
    monkeypatch.setattr(follow, "STATUS_EVERY", 0.0)


def watched(run_dir: Path, superlink: SuperLink) -> tuple[str, str]:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "server.log").write_text(json.dumps({"time": 1.0, "event": "started"}) + "\n")
    return follow.follow(run_dir, superlink, 1, lambda: None, lambda run_dir: None)


def test_a_restarted_superlink_is_queried_again(tmp_path: Path) -> None:
    away = (httpx.ConnectError("refused"), refusal(503), httpx.RemoteProtocolError("cut"))
    found = watched(tmp_path, SuperLink(*away, Status("finished", "failed", "why")))
    assert found == ("failed", "why")


def test_a_superlink_that_refuses_the_server_ends_it_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"refuses the server \(not you\)"):
        watched(tmp_path, SuperLink(refusal(403)))


def finished(run_dir: Path) -> follow.Result:
    (run_dir / "logs").mkdir(parents=True)
    anchor(run_dir).write_text("the authority")
    return follow.Result.of(run_dir, ("completed", ""), 1.0, [])


def test_a_copy_includes_its_own_authority_and_does_not_touch_the_local_engine_s(tmp_path: Path) -> None:
    target = tmp_path / "host"
    (target / "pki").mkdir(parents=True)
    (target / "pki" / "ca.pem").write_text("the local engine's")
    assert export(finished(tmp_path / "runs" / "a-run"), target)
    assert anchor(target / "a-run").read_text() == "the authority"
    assert (target / "pki" / "ca.pem").read_text() == "the local engine's"


def test_an_unwritable_folder_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert not export(finished(tmp_path / "runs" / "a-run"), tmp_path / "file")


def test_verify_prefers_the_run_s_own_authority_to_the_local_one(tmp_path: Path) -> None:
    run = tmp_path / "a-run"
    (run / "logs").mkdir(parents=True)
    assert "pki/ca.pem not found" in cli("transcript", "verify", run).stderr
    local = Authority.open(tmp_path / "pki")
    assert "manifest.json" in cli("transcript", "verify", run).stdout
    anchor(run).write_text("no certificate")
    assert "no PEM certificate" in cli("transcript", "verify", run).stderr
    anchor(run).write_bytes(local.pem)
    assert "no PEM certificate" not in cli("transcript", "verify", run).stderr


def test_the_end_is_signalled_even_if_the_kit_is_broken(tmp_path: Path) -> None:
    assert cli("train", tmp_path, "--done", tmp_path / "done").returncode == 2
    assert (tmp_path / "done").exists()


def test_an_unfinished_run_is_resumed_only_under_its_own_config(tmp_path: Path) -> None:
    """A kit that was provisioned again with another route refuses it before a process starts, and says what to do."""
    authority, began = Authority.open(tmp_path / "ca"), federation()
    provision(federation(route={"kind": "shuffler", "n_min": 3}, quorum=3), tmp_path / "kits", authority, sign=True)
    kit = tmp_path / "kits" / "server"
    run = kit / "runs" / "a-run"
    run.mkdir(parents=True)
    (kit / "state" / "unfinished").write_text(run.name)
    facts = {"format": 2, "run": run.name, "digest": began.digest, "config": began.model_dump(mode="json")}
    (run / "manifest.json").write_text(json.dumps({**facts, "observers": {}, "heads": {}, "files": {}}))
    done = cli("train", kit)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "quorum: 2 -> 3; route.n_min: 2 -> 3" in done.stderr
    assert f"fl-privacy train {kit} --new" in done.stderr
    assert list(run.iterdir()) == [run / "manifest.json"]
