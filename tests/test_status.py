"""`fl-privacy status` on all kinds of folders: waiting, running, ended, broken, and not a run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import cli
from fl_privacy.errors import TranscriptError
from fl_privacy.ops.status import read

NOW = 1_800_000_000.0


class Folder:
    """A run folder under construction."""

    def __init__(self, runs: Path, name: str = "run-1") -> None:
        self.path, self.home = runs / name, runs / ".state" / name
        (self.path / "logs").mkdir(parents=True)

    def manifest(self, status: str = "running", **config: Any) -> Folder:
        text = json.dumps({"run": self.path.name, "status": status, "config": {"rounds": 10, "deadline": 60, **config}})
        (self.path / "manifest.json").write_text(text)
        return self

    def log(self, name: str, *events: tuple[float, str, dict[str, Any]], role: str = "server") -> Folder:
        with (self.path / "logs" / f"{name}.log").open("a") as file:
            for at, event, fields in events:
                file.write(json.dumps({"time": NOW + at, "role": role, "event": event, **fields}) + "\n")
        return self

    def rounds(self, *rounds: int, every: float = 5.0) -> Folder:
        with (self.path / "metrics.jsonl").open("a") as file:
            for number in rounds:
                row = {"round": number, "accuracy": number / 10, "loss": 1.0, "rmse": None, "seconds": 4, "bytes": 1000}
                file.write(json.dumps(row) + "\n")
                self.log("server", (number * every, "evaluated", row))
        return self

    def checkpoint(self, round: int) -> Folder:
        (self.path / "checkpoints").mkdir(exist_ok=True)
        (self.path / "checkpoints" / f"round-{round:06d}.safetensors").touch()
        return self

    def pids(self, **pids: int) -> Folder:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "pids.json").write_text(json.dumps(pids))
        return self


WAITING, STARTED = (0.0, "waiting", {"sites": 3}), (1.0, "started", {"round": 1})


@pytest.fixture
def alive() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def gone() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_run_that_has_not_started_is_waiting(tmp_path: Path, alive: int) -> None:
    folder = Folder(tmp_path).pids(shuffler=alive)
    assert (read(folder.path).state, read(folder.path).rounds) == ("waiting", None)
    folder.log("server", WAITING)
    assert read(folder.path).state == "waiting"


def test_a_running_run_shows_round_score_and_time_left(tmp_path: Path, alive: int) -> None:
    folder = Folder(tmp_path).manifest().pids(shuffler=alive, superlink=gone())
    folder.log("server", WAITING, STARTED).rounds(0, 1, 2, 3)
    failed = {"round": 4, "attempt": 1, "reason": "2 of 3 updates\x1b[31m came"}
    folder.log("server", (16.0, "round", {"round": 4, "attempt": 1}), (17.0, "attempt-failed", failed))
    folder.log("server", (18.0, "round", {"round": 4, "attempt": 2}))
    folder.log("shuffler", (19.0, "accepted", {"round": 4, "count": 2, "cohort": 3}), role="shuffler")
    found = read(folder.path)
    assert (found.state, found.round, found.rounds, found.attempt, found.bytes) == ("running", 3, 10, 2, 4000)
    assert found.score == {"accuracy": 0.3, "loss": 1.0}
    assert (found.seconds_a_round, found.seconds_left) == (5.0, 35.0)
    assert found.failed_attempts == [{"round": 4, "attempt": 1, "reason": "2 of 3 updates [31m came"}]
    assert {p.name: (p.alive, p.last) for p in found.processes} == {
        "shuffler": (True, "accepted round 4 2 of 3"),
        "superlink": (False, ""),
    }


@pytest.mark.parametrize("pids", [True, False])
def test_a_run_whose_processes_exited_before_it_finished_was_interrupted(tmp_path: Path, pids: bool) -> None:
    folder = Folder(tmp_path).manifest().log("server", WAITING, STARTED).rounds(0, 1)
    folder.home.mkdir(parents=True)
    if pids:
        folder.pids(shuffler=gone())
    found = read(folder.path)
    assert (found.state, found.round, found.seconds_left) == ("interrupted", 1, None)
    assert found.reason.endswith(f"resume it with fl-privacy up --resume {folder.path}")


@pytest.mark.parametrize("status", ["completed", "failed", "interrupted"])
def test_a_run_whose_server_logged_no_end_has_the_status_of_its_manifest(tmp_path: Path, status: str) -> None:
    assert read(Folder(tmp_path).manifest(status).log("server", STARTED).path).state == status


def test_a_run_in_containers_is_not_reported_as_interrupted(tmp_path: Path) -> None:
    """Until it ends, only the launcher's files are on this machine."""
    home = tmp_path / ".state" / "heart-20261116-101832-b03d"
    home.mkdir(parents=True)
    (home / "compose.yaml").write_text("services: {}\n")
    (home / "federation.yaml").write_text("version: 1\nname: heart\nsites:\n- name: other\n")
    found = read(tmp_path / home.name)
    assert found.state == "in containers"
    assert "docker compose -p fl-privacy-heart ps" in found.reason
    assert "--resume" not in found.reason
    ended = Folder(tmp_path, home.name).manifest("completed").log("server", STARTED, (9.0, "completed", {}))
    assert read(ended.path).state == "completed"


@pytest.mark.parametrize("last", [(9.0, "failed", {"reason": "KeyboardInterrupt: "}), STARTED])
def test_a_run_of_a_kit_is_resumed_from_that_kit(tmp_path: Path, last: Any) -> None:
    kit = tmp_path / "{server}"
    for where, command in ((tmp_path / "elsewhere" / "runs", "KIT"), (kit / "runs", f"'{kit}'")):
        folder = Folder(where).manifest().log("server", STARTED, last).checkpoint(1)
        kit.mkdir(exist_ok=True)
        (kit / "kit.yaml").touch()
        found = read(folder.path, NOW + 5000)
        assert found.state == "interrupted"
        assert found.reason.endswith(f"resume it with fl-privacy train {command}")


def test_a_reused_pid_is_not_the_run_s(tmp_path: Path, alive: int) -> None:
    folder = Folder(tmp_path).manifest().log("server", STARTED).pids(shuffler=alive)
    long_ago = time.time() - 1000
    os.utime(folder.home / "pids.json", (long_ago, long_ago))
    assert read(folder.path).state == "interrupted"


def test_a_run_on_another_machine_is_judged_by_how_long_its_server_is_silent(tmp_path: Path) -> None:
    folder = Folder(tmp_path).manifest().log("server", WAITING, STARTED)
    assert read(folder.path, NOW + 300).state == "running"
    assert read(folder.path, NOW + 2000).state == "interrupted"


@pytest.mark.parametrize(
    ("event", "reason", "wanted"),
    [
        ("completed", "", "completed"),
        ("failed", "round 2 failed 3 times", "failed"),
        ("failed", "KeyboardInterrupt: ", "interrupted"),
    ],
)
def test_the_result_is_the_one_the_server_reported(tmp_path: Path, event: str, reason: str, wanted: str) -> None:
    folder = Folder(tmp_path).manifest("failed").log("server", STARTED, (9.0, event, {"reason": reason}))
    found = read(folder.path)
    assert found.state == wanted
    assert found.reason == reason or wanted == "interrupted"


def test_a_copy_without_logs_uses_its_manifest_and_a_resumed_run_its_newest_log(tmp_path: Path, alive: int) -> None:
    assert read(Folder(tmp_path, "copied").manifest("completed").path).state == "completed"
    resumed = Folder(tmp_path, "resumed").manifest().pids(shuffler=alive)
    resumed.log("server.1", STARTED, (2.0, "attempt-failed", {"round": 1, "attempt": 1, "reason": "x"}))
    resumed.log("server.1", (3.0, "failed", {"reason": "KeyboardInterrupt: "})).log("server", WAITING, STARTED)
    found = read(resumed.path)
    assert (found.state, len(found.failed_attempts)) == ("running", 1)


def test_budgets_are_those_that_the_sites_last_reported(tmp_path: Path) -> None:
    folder = Folder(tmp_path).manifest("completed")
    folder.log("worker-a", (1.0, "charged", {"spent": 1.0, "left": 9.0, "delta": 1e-5}), role="a")
    folder.log("worker-a", (2.0, "resend", {"spent": 2.0, "left": None, "delta": 1e-5}), role="a")
    (budget,) = read(folder.path).budgets
    assert (budget.site, budget.spent, budget.left) == ("a", 2.0, None)


JUNK = b'\x00\xff{"event":7}\n{"time":"x","event":"evaluated","round":"9"}\n[1]\n{"event":"round"}\nhalf {"ev'


def test_a_damaged_folder_does_not_crash_status(tmp_path: Path) -> None:
    folder = Folder(tmp_path).pids(shuffler=-1, **{"../x": 1})
    for name in ("server", "shuffler", "worker-a"):
        (folder.path / "logs" / f"{name}.log").write_bytes(JUNK)
    (folder.path / "metrics.jsonl").write_bytes(b'{"round":NaN}\n{"round":1e999}\n{"round":2,"accuracy":"high"}\n{')
    (folder.path / "manifest.json").write_text('{"config": [], "status": {}}')
    os.mkfifo(folder.path / "logs" / "sites.log")
    found = read(folder.path)
    assert (found.state, found.round, found.score) == ("interrupted", 2, {})
    done = cli("status", folder.path, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_manifest_that_is_not_json_is_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (folder.path / "manifest.json").write_text("{")
    with pytest.raises(TranscriptError, match=r"manifest\.json: damaged"):
        read(folder.path)


def test_a_folder_that_is_not_a_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "kit" / "logs").mkdir(parents=True)
    (tmp_path / "kit" / "kit.yaml").touch()
    for path, why in ((tmp_path / "kit", "not a run"), (tmp_path / "nothing", "no such run")):
        done = cli("status", path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"{path}: {why}" in done.stderr


def test_status_loads_nothing_heavy() -> None:
    code = "import sys, fl_privacy.cli, fl_privacy.ops.status\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'flwr', 'grpc', 'dp_accounting')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
