"""`fl-privacy train`: a SuperLink that disappears and returns, and copies of its runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from commands import cli
from fl_privacy import files
from fl_privacy.deploy.engines import follow
from fl_privacy.deploy.flower import Status
from fl_privacy.deploy.kits.provision import provision
from fl_privacy.deploy.kits.train import export
from fl_privacy.deploy.supervise import OFTEN
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
    for name in ("POLL", "CHECK_EVERY", "STATUS_EVERY", "FIRST_PAUSE", "LAST_WORDS"):
        monkeypatch.setattr(follow, name, 0.0)


def say(run_dir: Path, event: str, **fields: str) -> None:
    """What the server logs."""
    with (run_dir / "logs" / "server.log").open("a") as log:
        log.write(json.dumps({"time": 1.0, "event": event, **fields}) + "\n")


def watched(run_dir: Path, superlink: SuperLink) -> tuple[str, str]:
    (run_dir / "logs").mkdir()
    say(run_dir, "started")
    submitted = follow.Submitted(superlink, 1, lambda: 2, run_dir / "server.lock")
    return follow.Follower(run_dir, submitted, lambda: None).end()


def test_a_restarted_superlink_is_queried_again(tmp_path: Path) -> None:
    away = (httpx.ConnectError("refused"), refusal(503), httpx.RemoteProtocolError("cut"))
    found = watched(tmp_path, SuperLink(*away, Status("finished", "failed", "why")))
    assert found == ("failed", "why")


def test_a_superlink_that_refuses_the_server_ends_it_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"refuses the server \(not you\)"):
        watched(tmp_path, SuperLink(refusal(403)))


class Deaths:
    """A run whose ServerApp dies `count` times; then it completes. Every `rounds` deaths it has done one more round."""

    def __init__(self, run_dir: Path, count: int, rounds: int) -> None:
        self.run_dir, self.left, self.rounds = run_dir, count, rounds
        self.submitted = self.looked = 0
        (run_dir / "logs").mkdir()
        (run_dir / "checkpoints").mkdir()
        self.lock = files.lock(run_dir / "server.lock")

    def status(self, run: int) -> Status:
        assert run == self.submitted
        return Status("running", "", "")

    def look(self) -> None:
        """Every second look, the ServerApp that holds the lock dies, or reports its end."""
        self.looked += 1
        if self.looked % 2 or not self.lock:
            return
        if self.left:
            os.close(self.lock)
            self.lock, self.left = 0, self.left - 1
        else:
            say(self.run_dir, "completed")

    def again(self) -> int:
        self.submitted += 1
        if self.submitted % self.rounds == 0:
            (self.run_dir / "checkpoints" / f"round-{self.submitted:06d}.safetensors").touch()
        self.lock = files.lock(self.run_dir / "server.lock")
        return self.submitted

    def end(self) -> tuple[str, str]:
        submitted = follow.Submitted(self, 0, self.again, self.run_dir / "server.lock")
        return follow.Follower(self.run_dir, submitted, self.look).end()


def test_a_run_whose_serverapp_dies_is_submitted_again(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path, count=2 * OFTEN, rounds=2)
    assert deaths.end() == ("completed", "")
    assert deaths.submitted == 2 * OFTEN


def test_a_serverapp_that_keeps_dying_after_the_same_round_fails_the_run(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path, count=2 * OFTEN, rounds=100)
    status, reason = deaths.end()
    assert (status, deaths.submitted) == ("failed", OFTEN - 1)
    assert f"exited {OFTEN} times after the same round" in reason


@pytest.mark.parametrize("reason", ["SystemExit: 0", "KeyboardInterrupt: ", "RunNotRunningException: "])
def test_a_server_that_was_only_stopped_goes_on(tmp_path: Path, reason: str) -> None:
    """Its SuperLink was killed or away; its own log says that it failed."""
    (tmp_path / "logs").mkdir()
    say(tmp_path, "failed", reason=reason)
    submitted = follow.Submitted(SuperLink(), 1, lambda: say(tmp_path, "completed") or 2, tmp_path / "server.lock")
    assert follow.Follower(tmp_path, submitted, lambda: None).end() == ("completed", "")


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
